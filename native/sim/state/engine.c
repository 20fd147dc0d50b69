/*
 * Decides when which process computes. Each process has a queue of work, measured in engine nanoseconds; rotation.c
 * decides which process has the engine. No thread runs in the background: each reader first brings the engine up to the
 * present. An event gets the exact time at which its position was reached, also in a late query (history.c).
 */
#include "state.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * Locks the engine of the device that the queue is on. A restore may move the queue while this waits, so the function
 * checks the device again.
 */
static struct sim_device *lock_engine(struct sim_state *s, const struct sim_use *u)
{
    for (;;) {
        struct sim_device *d = &s->devices[atomic_load(&u->device)];
        sim_engine_lock(d);
        if (d == &s->devices[atomic_load(&u->device)])
            return d;
        sim_engine_unlock(d);
    }
}

uint32_t sim_engine_percent(struct sim_device *d, struct sim_engine *e)
{
    (void)d;
    return sim_history_percent(e->bucket_epoch, e->bucket_ns);
}

uint32_t sim_queue_percent(const struct sim_queue *q)
{
    return sim_history_percent(q->bucket_epoch, q->bucket_ns);
}

void sim_engine_advance(struct sim_state *s, struct sim_device *d, struct sim_engine *e)
{
    if (d->engine_torn) {
        sim_rotation_mend(s, d);
        d->engine_torn = 0;
    }
    sim_rotate(s, d, e, sim_now_ns());
}

void sim_engine_forget(struct sim_state *s, uint32_t ref, struct sim_use *u)
{
    struct sim_device *d = lock_engine(s, u);
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    sim_rotation_leave(e, ref);
    u->queue.active = 0;
    sim_engine_unlock(d);
}

static void activate(struct sim_engine *e, uint32_t ref, struct sim_queue *q)
{
    if (!q->active && e->active_count < SIM_MAX_ACTIVE) {
        q->active = 1;
        e->active[e->active_count++] = ref;
    }
    if (!q->active) /* the engine has more than SIM_MAX_ACTIVE queues: the work of this one takes no time */
        q->done = q->submitted;
}

void sim_engine_channels(struct sim_state *s, uint32_t ref, struct sim_use *u)
{
    struct sim_device *d = &s->devices[u->device];
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    if (sim_use_stands(u) && u->queue.active) {
        sim_rotation_leave(e, ref);
        u->queue.active = 0;
    } else if (!sim_use_stands(u) && !u->queue.active && u->queue.submitted - u->queue.done > SIM_WORK_EPSILON_NS) {
        if (e->active_count == 0)
            e->holder = 0; /* the change costs no switch: the call that enabled the channels has restored the state */
        activate(e, ref, &u->queue);
    }
    if (!sim_use_stands(u)) {
        atomic_fetch_add(&u->on_wake, 1);
        syscall(SYS_futex, &u->on_wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

double sim_engine_submit(struct sim_state *s, struct sim_proc *p, struct sim_use *u, double work_ns)
{
    struct sim_device *d = lock_engine(s, u);
    uint32_t ref = (uint32_t)((p - s->procs) * SIM_MAX_USES + (u - p->uses));
    while (sim_gate_shut(p)) { /* the process was suspended after this call began */
        sim_engine_unlock(d);
        sim_gate_wait(p);
        d = lock_engine(s, u);
    }
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    struct sim_queue *q = &u->queue;
    q->submitted += work_ns;
    if (!sim_use_stands(u))
        activate(e, ref, q);
    q->last_launch_ns = e->last_ns;
    double position = q->submitted;
    sim_engine_unlock(d);
    return position;
}

bool sim_engine_release(struct sim_state *s, struct sim_use *u, double position)
{
    struct sim_device *d = lock_engine(s, u);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    bool runs = !sim_use_stands(u);
    if (runs && u->queue.done < position)
        sim_history_jump(&u->queue, sim_now_ns(), position);
    sim_engine_unlock(d);
    return runs;
}

bool sim_engine_reached(struct sim_state *s, struct sim_use *u, double position, uint64_t *at_ns)
{
    struct sim_device *d = lock_engine(s, u);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    bool reached = u->queue.done + SIM_WORK_EPSILON_NS >= position;
    if (reached && at_ns != NULL)
        *at_ns = sim_history_when(&u->queue, position);
    sim_engine_unlock(d);
    return reached;
}

bool sim_engine_idle(struct sim_state *s, struct sim_use *u)
{
    struct sim_device *d = lock_engine(s, u);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    bool idle = u->queue.submitted - u->queue.done <= SIM_WORK_EPSILON_NS;
    sim_engine_unlock(d);
    return idle;
}

double sim_engine_left(struct sim_state *s, struct sim_use *u, double position)
{
    struct sim_device *d = lock_engine(s, u);
    double left = 0;
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    const struct sim_queue *q = &u->queue;
    bool reached = q->done + SIM_WORK_EPSILON_NS >= position;
    if (!reached && q->active)
        left = sim_rotation_left(s, d, e, u, position);
    else if (!reached && sim_use_stands(u))
        left = SIM_STANDS;
    sim_engine_unlock(d);
    return left;
}

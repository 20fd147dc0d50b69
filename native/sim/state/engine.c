/* Who computes when: a fluid model of one engine.
 *
 * Each process has a queue of work measured in engine nanoseconds. Processes with work pending
 * share the engine equally, as the driver's time slicing does, less what switching costs; the
 * clients of one MPS server run together as one of those, each held to its fraction of the SMs.
 * Nothing runs in the background: whoever looks brings the engine up to the present first. Every
 * queue keeps its recent rates, so an event gets the exact moment its position was reached, however
 * late somebody asks.
 */
#include "state.h"

#include <string.h>
#include <time.h>

#define EPSILON_NS 0.01
#define SPIN_BELOW_NS 60000.0
#define LOOK_AGAIN_NS 5000000.0 /* others may join or leave while one waits */

struct sim_engine *sim_engine_of(struct sim_device *d, int gi, int ci)
{
    return gi == SIM_NONE ? &d->whole : &d->mig_engines[gi][ci];
}

static struct sim_use *use_of(struct sim_state *s, uint32_t ref)
{
    return &s->procs[ref / SIM_MAX_USES].uses[ref % SIM_MAX_USES];
}

/* Locks the engine of the device where the queue is now: a restore may move it meanwhile. */
static struct sim_device *lock_engine(struct sim_state *s, const struct sim_use *u)
{
    for (;;) {
        struct sim_device *d = &s->devices[u->device];
        sim_engine_lock(d);
        if (d == &s->devices[u->device])
            return d;
        sim_engine_unlock(d);
    }
}

static void add_busy(uint64_t *epochs, uint64_t *sums, uint64_t from, uint64_t to)
{
    if (to - from > SIM_BUCKETS * SIM_BUCKET_NS)
        from = to - SIM_BUCKETS * SIM_BUCKET_NS;
    while (from < to) {
        uint64_t epoch = from / SIM_BUCKET_NS, end = (epoch + 1) * SIM_BUCKET_NS;
        uint32_t slot = (uint32_t)(epoch % SIM_BUCKETS);
        if (epochs[slot] != epoch) {
            epochs[slot] = epoch;
            sums[slot] = 0;
        }
        sums[slot] += (to < end ? to : end) - from;
        from = end;
    }
}

static uint32_t percent(const uint64_t *epochs, const uint64_t *sums)
{
    uint64_t epoch = sim_now_ns() / SIM_BUCKET_NS, busy = 0;
    for (uint64_t e = epoch - 8; e < epoch; e++)
        if (epochs[e % SIM_BUCKETS] == e)
            busy += sums[e % SIM_BUCKETS];
    uint64_t p = busy * 100 / (8 * SIM_BUCKET_NS);
    return p > 100 ? 100 : (uint32_t)p;
}

uint32_t sim_engine_percent(struct sim_device *d, struct sim_engine *e)
{
    (void)d;
    return percent(e->bucket_epoch, e->bucket_ns);
}

uint32_t sim_queue_percent(const struct sim_queue *q)
{
    return percent(q->bucket_epoch, q->bucket_ns);
}

static void begin_segment(struct sim_queue *q, uint64_t at, double rate)
{
    if (q->segment_count > 0) {
        const struct sim_segment *last = &q->segments[(q->segment_count - 1) % SIM_SEGMENTS];
        if (last->rate == rate)
            return;
    }
    q->segments[q->segment_count++ % SIM_SEGMENTS] = (struct sim_segment){at, q->done, rate};
}

static double mps_sum(struct sim_state *s, const struct sim_engine *e)
{
    double sum = 0;
    for (uint32_t i = 0; i < e->active_count; i++) {
        const struct sim_use *u = use_of(s, e->active[i]);
        sum += u->mps ? u->mps_fraction : 0;
    }
    return sum;
}

/* Engine nanoseconds per nanosecond that each active queue gets now. */
static void set_rates(struct sim_state *s, const struct sim_device *d, struct sim_engine *e,
                      uint64_t now, double *rates)
{
    double clients = mps_sum(s, e);
    uint32_t groups = clients > 0 ? 1 : 0;
    for (uint32_t i = 0; i < e->active_count; i++)
        groups += use_of(s, e->active[i])->mps ? 0 : 1;
    double each = groups > 1 ? d->timeslice_efficiency / groups : 1.0;
    for (uint32_t i = 0; i < e->active_count; i++) {
        struct sim_use *u = use_of(s, e->active[i]);
        rates[i] = each;
        if (u->mps)
            rates[i] *= clients > 1 ? u->mps_fraction / clients : u->mps_fraction;
        begin_segment(&u->queue, now, rates[i]);
    }
}

static void drop_finished(struct sim_state *s, struct sim_engine *e, uint64_t at)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < e->active_count; i++) {
        struct sim_use *u = use_of(s, e->active[i]);
        if (!u->used)
            continue;
        if (u->queue.submitted - u->queue.done > EPSILON_NS) {
            e->active[kept++] = e->active[i];
            continue;
        }
        u->queue.done = u->queue.submitted;
        u->queue.active = 0;
        begin_segment(&u->queue, at, 0);
    }
    e->active_count = kept;
}

static void run_for(struct sim_state *s, struct sim_engine *e, double step, const double *rates)
{
    uint64_t end = e->last_ns + (uint64_t)step;
    for (uint32_t i = 0; i < e->active_count; i++) {
        struct sim_queue *q = &use_of(s, e->active[i])->queue;
        q->done += step * rates[i];
        uint64_t share = (uint64_t)(step * rates[i]);
        add_busy(q->bucket_epoch, q->bucket_ns, end - share, end);
    }
    add_busy(e->bucket_epoch, e->bucket_ns, e->last_ns, end);
    e->busy_ns_total += step;
    e->last_ns = end;
}

void sim_engine_advance(struct sim_state *s, struct sim_device *d, struct sim_engine *e)
{
    uint64_t now = sim_now_ns();
    double rates[SIM_MAX_ACTIVE];
    drop_finished(s, e, e->last_ns);
    while (e->active_count > 0 && e->last_ns < now) {
        set_rates(s, d, e, e->last_ns, rates);
        double step = (double)(now - e->last_ns);
        for (uint32_t i = 0; i < e->active_count; i++) {
            const struct sim_queue *q = &use_of(s, e->active[i])->queue;
            double left = (q->submitted - q->done) / rates[i];
            if (left < step)
                step = left;
        }
        if (step < 1)
            step = 1; /* time is kept in whole nanoseconds; the rest is below one */
        run_for(s, e, step, rates);
        drop_finished(s, e, e->last_ns);
    }
    e->last_ns = now;
}

void sim_engine_forget(struct sim_state *s, uint32_t ref, struct sim_use *u)
{
    struct sim_device *d = lock_engine(s, u);
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < e->active_count; i++)
        if (e->active[i] != ref)
            e->active[kept++] = e->active[i];
    e->active_count = kept;
    u->queue.active = 0;
    sim_engine_unlock(d);
}

double sim_engine_submit(struct sim_state *s, struct sim_proc *p, struct sim_use *u, double work_ns)
{
    struct sim_device *d = lock_engine(s, u);
    uint32_t ref = (uint32_t)((p - s->procs) * SIM_MAX_USES + (u - p->uses));
    while (sim_gate_shut(p)) { /* suspended since this call began */
        sim_engine_unlock(d);
        sim_gate_wait(p);
        d = lock_engine(s, u);
    }
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    struct sim_queue *q = &u->queue;
    if (!q->active && e->active_count < SIM_MAX_ACTIVE) {
        q->active = 1;
        e->active[e->active_count++] = ref;
    }
    q->submitted += work_ns;
    if (!q->active) /* more than SIM_MAX_ACTIVE at once: this work passes in no time */
        q->done = q->submitted;
    q->last_launch_ns = e->last_ns;
    double position = q->submitted;
    sim_engine_unlock(d);
    return position;
}

static uint64_t time_of(const struct sim_queue *q, double position)
{
    uint32_t oldest = q->segment_count > SIM_SEGMENTS ? q->segment_count - SIM_SEGMENTS : 0;
    for (uint32_t i = q->segment_count; i > oldest; i--) {
        const struct sim_segment *g = &q->segments[(i - 1) % SIM_SEGMENTS];
        if (g->done < position || i - 1 == oldest) {
            if (g->rate <= 0 || g->done >= position)
                return g->at_ns;
            return g->at_ns + (uint64_t)((position - g->done) / g->rate);
        }
    }
    return 0;
}

bool sim_engine_reached(struct sim_state *s, struct sim_use *u, double position, uint64_t *at_ns)
{
    struct sim_device *d = lock_engine(s, u);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    bool reached = u->queue.done + EPSILON_NS >= position;
    if (reached && at_ns != NULL)
        *at_ns = time_of(&u->queue, position);
    sim_engine_unlock(d);
    return reached;
}

bool sim_engine_idle(struct sim_state *s, struct sim_use *u)
{
    struct sim_device *d = lock_engine(s, u);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    bool idle = u->queue.submitted - u->queue.done <= EPSILON_NS;
    sim_engine_unlock(d);
    return idle;
}

static double time_left(struct sim_state *s, struct sim_use *u, double position)
{
    struct sim_device *d = lock_engine(s, u);
    double left = 0;
    struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
    sim_engine_advance(s, d, e);
    const struct sim_queue *q = &u->queue;
    if (q->done + EPSILON_NS < position && q->active) {
        double rates[SIM_MAX_ACTIVE];
        set_rates(s, d, e, e->last_ns, rates);
        for (uint32_t i = 0; i < e->active_count; i++)
            if (use_of(s, e->active[i]) == u)
                left = (position - q->done) / rates[i] + 1;
    }
    sim_engine_unlock(d);
    return left;
}

void sim_engine_wait(struct sim_state *s, struct sim_use *u, double position)
{
    for (uint32_t looks = 1;; looks++) {
        double left = time_left(s, u, position);
        if (left <= 0)
            return;
        if (looks % 8 == 0) { /* another's death speeds this engine up: notice it */
            sim_lock(s);
            sim_sweep(s);
            sim_unlock(s);
        }
        if (left < SPIN_BELOW_NS)
            continue; /* the kernel's timer slack alone is 50 us */
        left -= SPIN_BELOW_NS;
        if (left > LOOK_AGAIN_NS)
            left = LOOK_AGAIN_NS;
        struct timespec t = {0, (long)left};
        nanosleep(&t, NULL);
    }
}

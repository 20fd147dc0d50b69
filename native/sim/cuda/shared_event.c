/*
 * Events that other processes open by a handle. The node's state has the position at which such an event was recorded
 * last. A stream that waits for work of another process waits at once, on the host, because that work is already
 * submitted.
 */
#include <unistd.h>

#include "internal.h"

bool cu_shared_alive(const struct sim_shared_event *e)
{
    return atomic_load(&e->used) && sim_start_ticks(e->owner_pid, NULL) == e->owner_ticks;
}

/* Returns a free entry, or the entry of a dead process; NULL if there is none. The caller holds sim_lock. */
static struct sim_shared_event *claim(void)
{
    for (uint32_t i = 0; i < SIM_MAX_SHARED_EVENTS; i++) {
        struct sim_shared_event *e = &cu.s->shared_events[i];
        if (cu_shared_alive(e))
            continue;
        *e = (struct sim_shared_event){.owner_pid = (uint32_t)getpid(),
                                       .owner_ticks = cu.proc->start_ticks,
                                       .id = ++cu.s->next_shared_event,
                                       .position = -1};
        atomic_store(&e->used, 1);
        return e;
    }
    return NULL;
}

static bool is_current(const CUevent e)
{
    return atomic_load(&e->shared->used) && e->shared->id == e->shared_id;
}

bool cu_shared_make(CUevent e)
{
    cu_lock();
    sim_lock(cu.s);
    if (e->shared == NULL && (e->shared = claim()) != NULL)
        e->shared_id = e->shared->id;
    sim_unlock(cu.s);
    cu_unlock();
    return e->shared != NULL;
}

void cu_shared_record(CUevent e)
{
    const struct sim_use *use = cu_device_of(e->ctx)->use;
    sim_lock(cu.s);
    if (is_current(e)) {
        e->shared->proc = (uint32_t)(cu.proc - cu.s->procs);
        e->shared->use = (uint32_t)(use - cu.proc->uses);
        e->shared->proc_ticks = cu.proc->start_ticks;
        e->shared->position = e->position;
    }
    sim_unlock(cu.s);
}

bool cu_shared_elsewhere(CUevent e)
{
    sim_lock(cu.s);
    bool elsewhere = is_current(e) && e->shared->position >= 0 && &cu.s->procs[e->shared->proc] != cu.proc;
    sim_unlock(cu.s);
    return elsewhere;
}

bool cu_shared_reached(CUevent e)
{
    sim_lock(cu.s);
    struct sim_proc *p = &cu.s->procs[e->shared->proc];
    struct sim_use *u = &p->uses[e->shared->use];
    bool dead = !is_current(e) || !atomic_load(&p->used) || p->start_ticks != e->shared->proc_ticks || !u->used ||
                sim_start_ticks(p->pid, NULL) != p->start_ticks;
    bool reached = dead || sim_engine_reached(cu.s, u, e->shared->position, NULL);
    sim_unlock(cu.s);
    return reached;
}

void cu_shared_wait(CUevent e)
{
    while (!cu_shared_reached(e))
        nanosleep(&(struct timespec){0, 100000}, NULL);
}

void cu_shared_leave(CUevent e)
{
    sim_lock(cu.s);
    if (is_current(e) && e->shared->owner_pid == (uint32_t)getpid())
        atomic_store(&e->shared->used, 0);
    sim_unlock(cu.s);
}

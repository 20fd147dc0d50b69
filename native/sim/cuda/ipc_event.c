/* Events that other processes know by a handle. Where such an event was recorded last stands in the node's state.
 * A stream that waits for another process's work waits at once, on the host: that work is already given. */
#include <unistd.h>

#include "internal.h"

#define EVENT_MAGIC 0x69706532u

struct event_handle {
    uint32_t magic, slot;
    uint64_t id;
};

static bool is_alive(const struct sim_shared_event *e)
{
    return atomic_load(&e->used) && sim_start_ticks(e->owner_pid, NULL) == e->owner_ticks;
}

/* A free place, if need be that of a dead process. The caller holds sim_lock. */
static struct sim_shared_event *claim(void)
{
    for (uint32_t i = 0; i < SIM_MAX_SHARED_EVENTS; i++) {
        struct sim_shared_event *e = &cu.s->shared_events[i];
        if (is_alive(e))
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

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    CU_TRY(cu_enter("cuIpcGetEventHandle"));
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(handle != NULL && (event->flags & CU_EVENT_INTERPROCESS) != 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    sim_lock(cu.s);
    if (event->shared == NULL && (event->shared = claim()) != NULL)
        event->shared_id = event->shared->id;
    sim_unlock(cu.s);
    cu_unlock();
    CU_CHECK(event->shared != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    if (event->recorded)
        cu_shared_record(event);
    struct event_handle given = {EVENT_MAGIC, (uint32_t)(event->shared - cu.s->shared_events), event->shared_id};
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &given, sizeof(given));
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    struct event_handle given;
    CU_TRY(cu_enter("cuIpcOpenEventHandle"));
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    memcpy(&given, &handle, sizeof(given));
    CU_CHECK(given.magic == EVENT_MAGIC && given.slot < SIM_MAX_SHARED_EVENTS, CUDA_ERROR_INVALID_HANDLE);
    struct sim_shared_event *shared = &cu.s->shared_events[given.slot];
    CU_CHECK(is_alive(shared) && shared->id == given.id, CUDA_ERROR_MAP_FAILED);
    CU_CHECK(shared->owner_pid != (uint32_t)getpid(), CUDA_ERROR_INVALID_CONTEXT);
    CU_TRY(cuEventCreate(out, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    (*out)->shared_id = given.id;
    (*out)->shared = shared;
    return CUDA_SUCCESS;
}

/* The handles by which other processes open an event. */
#include <unistd.h>

#include "internal.h"

#define EVENT_MAGIC 0x69706532u

struct event_handle {
    uint32_t magic, slot;
    uint64_t id;
};

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    CU_TRY(cu_enter("cuIpcGetEventHandle"));
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(handle != NULL && (event->flags & CU_EVENT_INTERPROCESS) != 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(cu_shared_make(event), CUDA_ERROR_OUT_OF_MEMORY);
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
    CU_CHECK(cu_shared_alive(shared) && shared->id == given.id, CUDA_ERROR_MAP_FAILED);
    CU_CHECK(shared->owner_pid != (uint32_t)getpid(), CUDA_ERROR_INVALID_CONTEXT);
    CU_TRY(cuEventCreate(out, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    (*out)->shared_id = given.id;
    (*out)->shared = shared;
    return CUDA_SUCCESS;
}

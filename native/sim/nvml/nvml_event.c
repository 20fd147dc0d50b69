/* Event sets: Xid errors and MIG configuration changes. */
#include <stdlib.h>

#include "internal.h"

#define LONGEST_SLEEP_NS UINT64_C(1000000000) /* after this time a waiting thread checks whether NVML was shut down */

struct nvmlEventSet_st {
    unsigned long long types[SIM_MAX_DEVICES];
    uint64_t next;
};

static unsigned long long supported(const struct sim_state *s)
{
    unsigned long long types = nvmlEventTypeXidCriticalError | nvmlEventMigConfigChange;
    return sim_branch(s) >= 580 ? types | nvmlEventTypeGpuRecoveryAction : types;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetSupportedEventTypes", device, &c));
    if (types == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *types = supported(c.s);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlEventSetCreate", &s));
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof(**set));
    if (*set == NULL)
        return NVML_ERROR_MEMORY;
    (*set)->next = __atomic_load_n(&s->next_event, __ATOMIC_ACQUIRE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceRegisterEvents", device, &c));
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if ((types & ~supported(c.s)) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    set->types[c.device] |= types;
    return NVML_SUCCESS;
}

static bool take(struct sim_state *s, nvmlEventSet_t set, nvmlEventData_t *data)
{
    bool hit = false;
    sim_lock(s);
    if (s->next_event - set->next > SIM_MAX_EVENTS) /* newer events have overwritten the oldest ones */
        set->next = s->next_event - SIM_MAX_EVENTS;
    while (!hit && set->next < s->next_event) {
        const struct sim_event *e = &s->events[set->next++ % SIM_MAX_EVENTS];
        hit = (set->types[e->device] & e->type) != 0;
        if (hit)
            *data = (nvmlEventData_t){nv_device_handle(e->device), e->type, e->data, (unsigned int)e->gi,
                                      (unsigned int)e->ci};
    }
    sim_unlock(s);
    return hit;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlEventSetWait_v2", &s));
    if (set == NULL || data == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t end = sim_now_ns() + (uint64_t)timeout_ms * 1000000;
    for (;;) {
        uint32_t seen = atomic_load(&s->event_wake);
        if (take(s, set, data))
            return NVML_SUCCESS;
        if (nv_state() == NULL)
            return NVML_ERROR_UNINITIALIZED;
        uint64_t now = sim_now_ns();
        if (now >= end)
            return NVML_ERROR_TIMEOUT;
        sim_event_sleep(s, seen, end - now < LONGEST_SLEEP_NS ? end - now : LONGEST_SLEEP_NS);
    }
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

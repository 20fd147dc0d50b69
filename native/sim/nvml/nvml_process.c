/* The processes of a device: process lists of every version, utilisation by process. */
#include "internal.h"

enum list { LIST_COMPUTE, LIST_MPS };

struct entry {
    uint32_t pid;
    uint64_t bytes;
    int gi, ci;
    uint32_t percent;
    uint64_t last_us;
};

static bool wanted(const struct nv_call *c, const struct sim_use *u, enum list list)
{
    if (!u->used || u->contexts == 0 || u->device != c->device)
        return false;
    if (c->mig && (u->gi != c->gi || u->ci != c->ci))
        return false;
    return (u->mps != 0) == (list == LIST_MPS);
}

/* Copies at most `room` entries; returns the number of all entries. */
static unsigned int collect(struct nv_call *c, enum list list, struct entry *out, unsigned int room)
{
    unsigned int n = 0;
    sim_lock(c->s);
    sim_sweep(c->s);
    uint32_t high = atomic_load(&c->s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_proc *p = &c->s->procs[i];
        for (uint32_t j = 0; sim_proc_holds(p) && j < SIM_MAX_USES && p->uses[j].used; j++) {
            const struct sim_use *u = &p->uses[j];
            if (!wanted(c, u, list))
                continue;
            if (n < room)
                out[n] = (struct entry){p->pid,
                                        sim_use_bytes(u),
                                        u->gi,
                                        u->ci,
                                        sim_queue_percent(&u->queue),
                                        u->queue.last_launch_ns == 0 ? 0 : sim_wall_us()};
            n++;
        }
    }
    sim_unlock(c->s);
    return n;
}

static nvmlReturn_t list_of(const char *function, nvmlDevice_t device, enum list list, unsigned int *count,
                            struct entry *out)
{
    struct nv_call c;
    NV_TRY(nv_enter(function, device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = *count > SIM_MAX_PROCS ? SIM_MAX_PROCS : *count;
    *count = collect(&c, list, out, room);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t list_v2(const char *function, nvmlDevice_t device, enum list list, unsigned int *count,
                            nvmlProcessInfo_v2_t *infos)
{
    struct entry found[SIM_MAX_PROCS];
    if (count != NULL && *count > 0 && infos == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(list_of(function, device, list, count, found));
    for (unsigned int i = 0; i < *count; i++) /* the sentinel SIM_NONE equals NVML's 0xFFFFFFFF */
        infos[i] = (nvmlProcessInfo_v2_t){found[i].pid, found[i].bytes, (unsigned int)found[i].gi,
                                          (unsigned int)found[i].ci};
    return NVML_SUCCESS;
}

static nvmlReturn_t list_v1(const char *function, nvmlDevice_t device, enum list list, unsigned int *count,
                            nvmlProcessInfo_v1_t *infos)
{
    struct entry found[SIM_MAX_PROCS];
    if (count != NULL && *count > 0 && infos == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(list_of(function, device, list, count, found));
    for (unsigned int i = 0; i < *count; i++)
        infos[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].bytes};
    return NVML_SUCCESS;
}

#define PROCESS_LIST(name, list)                                                                  \
    nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)    \
    {                                                                                             \
        return list_v2(#name "_v3", device, list, count, infos);                                  \
    }                                                                                             \
    nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos) \
    {                                                                                             \
        return list_v2(#name "_v2", device, list, count, infos);                                  \
    }                                                                                             \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos)      \
    {                                                                                             \
        return list_v1(#name, device, list, count, infos);                                        \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, LIST_COMPUTE)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, LIST_MPS)

/* A simulated card has no graphics processes. */
static nvmlReturn_t no_graphics(const char *function, nvmlDevice_t device, unsigned int *count)
{
    struct nv_call c;
    NV_TRY(nv_enter(function, device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_graphics("nvmlDeviceGetGraphicsRunningProcesses_v3", device, count);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_v2_t *infos)
{
    (void)infos;
    return no_graphics("nvmlDeviceGetGraphicsRunningProcesses_v2", device, count);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                   nvmlProcessInfo_v1_t *infos)
{
    (void)infos;
    return no_graphics("nvmlDeviceGetGraphicsRunningProcesses", device, count);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetUtilizationRates", device, &c));
    if (utilization == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (c.d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_engine_lock(c.d);
    sim_engine_advance(c.s, c.d, &c.d->whole);
    utilization->gpu = sim_engine_percent(c.d, &c.d->whole);
    sim_engine_unlock(c.d);
    utilization->memory = utilization->gpu / 2;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long last_seen_us)
{
    struct nv_call c;
    struct entry found[SIM_MAX_PROCS];
    NV_TRY(nv_enter_physical("nvmlDeviceGetProcessUtilization", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (c.d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_engine_lock(c.d);
    sim_engine_advance(c.s, c.d, &c.d->whole);
    sim_engine_unlock(c.d);
    unsigned int n = collect(&c, LIST_COMPUTE, found, SIM_MAX_PROCS), kept = 0;
    for (unsigned int i = 0; i < n; i++)
        if (found[i].last_us > last_seen_us)
            found[kept++] = found[i];
    unsigned int room = samples == NULL ? 0 : *count;
    *count = kept;
    if (kept == 0)
        return NVML_ERROR_NOT_FOUND;
    if (kept > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < kept; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){.pid = found[i].pid,
                                                      .timeStamp = found[i].last_us,
                                                      .smUtil = found[i].percent,
                                                      .memUtil = found[i].percent / 2};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    nvmlProcessUtilizationSample_t samples[SIM_MAX_PROCS];
    NV_SINCE(nv_state(), 550);
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlProcessesUtilizationInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    unsigned int room = info->procUtilArray == NULL ? 0 : info->processSamplesCount;
    unsigned int n = SIM_MAX_PROCS;
    NV_TRY(nvmlDeviceGetProcessUtilization(device, samples, &n, info->lastSeenTimeStamp));
    info->processSamplesCount = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.timeStamp = samples[i].timeStamp,
                                                                   .pid = samples[i].pid,
                                                                   .smUtil = samples[i].smUtil,
                                                                   .memUtil = samples[i].memUtil};
    return NVML_SUCCESS;
}

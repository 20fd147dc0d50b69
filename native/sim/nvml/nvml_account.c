/* Accounting: the use of processes, during their life and after it. */
#include "internal.h"

static const struct sim_use *use_on(const struct sim_proc *p, uint32_t device)
{
    for (uint32_t i = 0; i < SIM_MAX_USES; i++)
        if (p->uses[i].used && p->uses[i].device == device && p->uses[i].peak_bytes > 0)
            return &p->uses[i];
    return NULL;
}

/* Returns the stored record at `age` (0: the latest), or NULL. */
static const struct sim_account *kept(const struct sim_device *d, uint64_t age)
{
    if (age >= d->account_count || age >= SIM_MAX_ACCOUNTS)
        return NULL;
    return &d->accounts[(d->account_count - 1 - age) % SIM_MAX_ACCOUNTS];
}

static nvmlReturn_t enter(const char *function, nvmlDevice_t device, struct nv_call *c)
{
    NV_TRY(nv_enter_physical(function, device, c));
    return c->d->accounting ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    struct nv_call c;
    NV_TRY(enter("nvmlDeviceGetAccountingPids", device, &c));
    if (count == NULL || (pids == NULL && *count > 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = *count, n = 0;
    sim_lock(c.s);
    sim_sweep(c.s);
    uint32_t high = atomic_load(&c.s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        const struct sim_proc *p = &c.s->procs[i];
        if (!atomic_load(&p->used) || use_on(p, c.device) == NULL)
            continue;
        if (n < room)
            pids[n] = p->pid;
        n++;
    }
    const struct sim_account *a;
    for (uint64_t age = 0; (a = kept(c.d, age)) != NULL; age++, n++)
        if (n < room)
            pids[n] = a->pid;
    sim_unlock(c.s);
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static bool find_running(struct nv_call *c, unsigned int pid, struct sim_account *out)
{
    uint32_t high = atomic_load(&c->s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        const struct sim_proc *p = &c->s->procs[i];
        const struct sim_use *u = use_on(p, c->device);
        if (!atomic_load(&p->used) || p->pid != pid || u == NULL)
            continue;
        *out = sim_account_of(p, u);
        return true;
    }
    return false;
}

static bool find_ended(struct nv_call *c, unsigned int pid, struct sim_account *out)
{
    const struct sim_account *a;
    for (uint64_t age = 0; (a = kept(c->d, age)) != NULL; age++) {
        if (a->pid == pid) {
            *out = *a;
            return true;
        }
    }
    return false;
}

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    struct nv_call c;
    struct sim_account a;
    NV_TRY(enter("nvmlDeviceGetAccountingStats", device, &c));
    if (stats == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_lock(c.s);
    sim_sweep(c.s);
    bool running = find_running(&c, pid, &a), found = running || find_ended(&c, pid, &a);
    sim_unlock(c.s);
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    *stats = (nvmlAccountingStats_t){.gpuUtilization = a.gpu_percent,
                                     .memoryUtilization = a.gpu_percent / 2,
                                     .maxMemoryUsage = a.peak_bytes,
                                     .time = running ? 0 : a.lasted_ms,
                                     .startTime = a.started_us,
                                     .isRunning = running};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceClearAccountingPids(nvmlDevice_t device)
{
    struct nv_call c;
    NV_TRY(enter("nvmlDeviceClearAccountingPids", device, &c));
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    c.d->account_count = 0;
    sim_unlock(c.s);
    return NVML_SUCCESS;
}

/* cuInit, versions, and the way into every call. */
#include "internal.h"

struct cu_process cu = {.lock = PTHREAD_MUTEX_INITIALIZER, .mps_fraction = 1.0, .rm_file = -1};
static _Atomic int g_state; /* 0: not initialised, 1: ready, 2: child of a process that was */

void vgpuSimSetKernelMicroseconds(double microseconds);

void vgpuSimSetKernelMicroseconds(double microseconds)
{
    cu.kernel_us = microseconds;
}

void cu_lock(void)
{
    pthread_mutex_lock(&cu.lock);
}

void cu_unlock(void)
{
    pthread_mutex_unlock(&cu.lock);
}

static void after_fork(void)
{
    if (atomic_load(&g_state) == 1)
        atomic_store(&g_state, 2);
    pthread_mutex_init(&cu.lock, NULL);
}

static CUresult start(void)
{
    struct sim_state *s = sim_attach();
    if (s == NULL)
        return CUDA_ERROR_NO_DEVICE;
    int fault = sim_fault(s, "cuInit", -1);
    if (fault != 0)
        return (CUresult)fault;
    cu.s = s;
    const char *us = getenv("VGPU_SIM_KERNEL_US");
    if (us != NULL)
        cu.kernel_us = atof(us);
    CU_TRY(cu_find_devices(NULL));
    if (cu.device_count == 0)
        return CUDA_ERROR_NO_DEVICE;
    CU_TRY(cu_mps_connect());
    sim_lock(s);
    cu.proc = sim_proc_self(s);
    sim_unlock(s);
    CU_CHECK(cu.proc != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    cu.boot = __atomic_load_n(&s->boot_count, __ATOMIC_RELAXED);
    pthread_atfork(NULL, NULL, after_fork);
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
    CU_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    int state = atomic_load_explicit(&g_state, memory_order_acquire);
    if (state != 0)
        return state == 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    cu_lock();
    CUresult result = CUDA_SUCCESS;
    if (atomic_load(&g_state) == 0) {
        result = start();
        if (result == CUDA_SUCCESS)
            atomic_store_explicit(&g_state, 1, memory_order_release);
    }
    cu_unlock();
    return result;
}

bool cu_checkpointed(void)
{
    return sim_gate_of(atomic_load_explicit(&cu.proc->gate, memory_order_acquire)) == SIM_CHECKPOINTED;
}

CUresult cu_gate(void)
{
    for (;;) {
        uint32_t gate = atomic_load_explicit(&cu.proc->gate, memory_order_acquire);
        if (gate == atomic_load_explicit(&cu.gate_seen, memory_order_relaxed))
            return CUDA_SUCCESS;
        if (sim_gate_of(gate) == SIM_FAILED)
            return CUDA_ERROR_UNKNOWN;
        if (sim_gate_of(gate) != SIM_RUNNING) {
            sim_gate_wait(cu.proc);
            continue;
        }
        for (int i = 0; i < cu.device_count; i++) /* several threads may: they write the same */
            cu.devices[i].device = cu.proc->card_of[cu.devices[i].card];
        atomic_store_explicit(&cu.gate_seen, gate, memory_order_relaxed);
    }
}

void cu_sim_lock(void)
{
    sim_lock(cu.s);
    while (sim_gate_shut(cu.proc)) {
        sim_unlock(cu.s);
        cu_gate();
        sim_lock(cu.s);
    }
}

CUresult cu_enter(const char *function)
{
    CU_TRY(cu_enter_locked_out(function));
    CU_TRY(cu_gate());
    cu_holds_look();
    return CUDA_SUCCESS;
}

CUresult cu_enter_suspended(const char *function)
{
    CU_TRY(cu_enter_locked_out(function));
    return cu_checkpointed() ? CUDA_SUCCESS : cu_gate();
}

CUresult cu_enter_locked_out(const char *function)
{
    if (atomic_load_explicit(&g_state, memory_order_acquire) != 1)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (__atomic_load_n(&cu.s->boot_count, __ATOMIC_RELAXED) != cu.boot)
        return CUDA_ERROR_DEINITIALIZED; /* the node has rebooted under this process */
    int broken = atomic_load_explicit(&cu.mps_fault, memory_order_relaxed);
    if (broken != 0)
        return (CUresult)broken;
    return (CUresult)sim_fault(cu.s, function, -1);
}

CUresult cu_enter_device(const char *function, CUdevice dev)
{
    CU_TRY(cu_enter(function));
    return dev >= 0 && dev < cu.device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cu_enter_context(const char *function, CUcontext *ctx)
{
    CU_TRY(cu_enter(function));
    return cu_find_context(ctx);
}

CUresult cu_find_context(CUcontext *ctx)
{
    *ctx = cu_current();
    CU_CHECK(*ctx != NULL, CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(cu_is_context(*ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return cu_sim_device((*ctx)->ordinal)->lost ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

struct sim_device *cu_sim_device(int ordinal)
{
    return &cu.s->devices[cu.devices[ordinal].device];
}

uint32_t cu_sm_count(int ordinal)
{
    const struct cu_device *d = &cu.devices[ordinal];
    const struct sim_device *card = cu_sim_device(ordinal);
    return d->gi == SIM_NONE ? card->sm_count : card->gis[d->gi].cis[d->ci].sm_count;
}

CUresult cuDriverGetVersion(int *version)
{
    CU_CHECK(version != NULL, CUDA_ERROR_INVALID_VALUE);
    struct sim_state *s = sim_attach();
    *version = s == NULL ? 0 : (int)s->cuda_version;
    return CUDA_SUCCESS;
}

CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    CU_CHECK(table != NULL, CUDA_ERROR_INVALID_VALUE);
    *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED; /* NVIDIA's private interface: no simulated driver has it */
}

/* cuInit and the version queries. */
#include "internal.h"

static void after_fork(void)
{
    if (atomic_load(&cu.started) == 1)
        atomic_store(&cu.started, 2);
    pthread_mutex_init(&cu.lock, NULL);
}

/*
 * Registers the fork handler. The caller does so before it takes the first lock, so that a child forked during another
 * thread's cuInit gets a lock of its own.
 */
static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
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
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
    CU_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    int state = atomic_load_explicit(&cu.started, memory_order_acquire);
    if (state != 0)
        return state == 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    cu_lock();
    CUresult result = CUDA_SUCCESS;
    if (atomic_load(&cu.started) == 0) {
        result = start();
        if (result == CUDA_SUCCESS)
            atomic_store_explicit(&cu.started, 1, memory_order_release);
    }
    cu_unlock();
    return result;
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
    return CUDA_ERROR_NOT_SUPPORTED; /* NVIDIA's private interface, which the simulated driver lacks */
}

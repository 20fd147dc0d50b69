/*
 * Checks at the start of a CUDA call: whether the driver is ready, whether the process is locked (most calls then
 * wait), and whether a fault is set for the call.
 */
#include "internal.h"

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
    if (atomic_load_explicit(&cu.started, memory_order_acquire) != 1)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (__atomic_load_n(&cu.s->boot_count, __ATOMIC_RELAXED) != cu.boot)
        return CUDA_ERROR_DEINITIALIZED; /* the node has rebooted since this process started */
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

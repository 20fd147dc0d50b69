/*
 * stream.c: streams and synchronisation. A stream takes about 560 KiB on an H200, which stay with the
 * context when it is destroyed: that is learnt. At a synchronisation pools give memory back.
 */
#include "away.h"
#include "device.h"
#include "functions.h"
#include "learn.h"
#include "pool.h"
#include "tenant.h"

static CUresult made(CUresult result)
{
    CUdevice device;
    bool limited;
    if (result == CUDA_SUCCESS && vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited &&
        vgpu_device_current(&device) == CUDA_SUCCESS && vgpu_device_index(device) != VGPU_NOT_IN_LEASE)
        vgpu_learn(vgpu_device_index(device), 0);
    return result;
}

VGPU_EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    return made(CALL(cuStreamCreate, phStream, Flags));
}

VGPU_EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    return made(CALL(cuStreamCreateWithPriority, phStream, flags, priority));
}

VGPU_EXPORT CUresult cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)
{
    return made(CALL(cuGreenCtxStreamCreate, phStream, greenCtx, flags, priority));
}

/* The memory that others see this process hold is true again when its work is done. */
static CUresult synchronised(CUresult result)
{
    uint32_t stale = __atomic_load_n(&vgpu_learn_stale, __ATOMIC_RELAXED);
    vgpu_pool_synchronised();
    for (int device = 0; stale != 0; device++, stale >>= 1)
        if (stale & 1)
            vgpu_learn_once(device);
    return result;
}

VGPU_EXPORT CUresult cuCtxSynchronize(void)
{
    vgpu_away_call();
    return synchronised(CALL(cuCtxSynchronize));
}

VGPU_EXPORT CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
    vgpu_away_call();
    return synchronised(CALL(cuCtxSynchronize_v2, ctx));
}

VGPU_EXPORT CUresult cuStreamSynchronize(CUstream hStream)
{
    vgpu_away_call();
    return synchronised(CALL(cuStreamSynchronize, hStream));
}

VGPU_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream hStream)
{
    vgpu_away_call();
    return synchronised(CALL(cuStreamSynchronize_ptsz, hStream));
}

VGPU_EXPORT CUresult cuEventSynchronize(CUevent hEvent)
{
    vgpu_away_call();
    return synchronised(CALL(cuEventSynchronize, hEvent));
}

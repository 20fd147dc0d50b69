/*
 * stream.c: streams and synchronisation. A stream takes about 560 KiB on an H200. This memory stays with the context
 * when the stream is destroyed, and is measured. At a synchronisation, pools return memory to the driver.
 */
#include "suspended.h"
#include "charge.h"
#include "functions.h"
#include "driver_overhead.h"
#include "pool.h"

static CUresult made(struct vgpu_charge *charge, CUresult result)
{
    if (!charge->active)
        return result;
    if (result == CUDA_SUCCESS)
        vgpu_overhead_look(charge->device, charge->bytes);
    vgpu_charge_undo(charge, result);
    return result;
}

/* Creates a stream. One page is claimed, because a stream's memory may fit into an existing page, or need one more. */
#define CREATE_BODY(symbol, ...)                                                             \
    do {                                                                                     \
        struct vgpu_charge charge;                                                           \
        vgpu_suspended_call();                                                               \
        CUresult refused = vgpu_charge_current(&charge, VGPU_PAGE_BYTES);                    \
        return refused != CUDA_SUCCESS ? refused : made(&charge, CALL(symbol, __VA_ARGS__)); \
    } while (0)

VGPU_EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    CREATE_BODY(cuStreamCreate, phStream, Flags);
}

VGPU_EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    CREATE_BODY(cuStreamCreateWithPriority, phStream, flags, priority);
}

/*
 * Called after a synchronisation. Settles the charges of the memory pools, and measures the driver's own memory on the
 * devices where it may have changed.
 */
static CUresult synchronised(CUresult result)
{
    uint32_t left = __atomic_load_n(&vgpu_overhead_left, __ATOMIC_RELAXED);
    uint32_t stale = __atomic_load_n(&vgpu_overhead_stale, __ATOMIC_RELAXED) & ~left;
    vgpu_pool_synchronised();
    for (int device = 0; (stale | left) != 0; device++, stale >>= 1, left >>= 1)
        if (left & 1)
            vgpu_overhead_leftovers(device);
        else if (stale & 1)
            vgpu_overhead_look_once(device);
    return result;
}

VGPU_EXPORT CUresult cuCtxSynchronize(void)
{
    vgpu_suspended_call();
    return synchronised(CALL(cuCtxSynchronize));
}

VGPU_EXPORT CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
    vgpu_suspended_call();
    return synchronised(CALL(cuCtxSynchronize_v2, ctx));
}

VGPU_EXPORT CUresult cuStreamSynchronize(CUstream hStream)
{
    vgpu_suspended_call();
    return synchronised(CALL(cuStreamSynchronize, hStream));
}

VGPU_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream hStream)
{
    vgpu_suspended_call();
    return synchronised(CALL(cuStreamSynchronize_ptsz, hStream));
}

VGPU_EXPORT CUresult cuEventSynchronize(CUevent hEvent)
{
    vgpu_suspended_call();
    return synchronised(CALL(cuEventSynchronize, hEvent));
}

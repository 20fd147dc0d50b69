/*
 * green.c: green contexts. A green context retains the primary context of its device, and creates it if needed, so the
 * primary context is claimed as if the program had retained it. The green context's own memory is claimed at the size
 * that one of 16 SMs had on an H200, and then read from NVML. Memory that is allocated while it is current belongs to
 * the primary context.
 */
#include "suspended.h"
#include "capture.h"
#include "charge.h"
#include "context.h"
#include "device.h"
#include "functions.h"
#include "module.h"
#include "driver_overhead.h"
#include "in_flight.h"
#include "primary.h"
#include "tenant.h"

enum { CLAIM_BYTES = 6 << 20 };
static void note(CUcontext context)
{
    CUdevice device;
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited ||
        vgpu_device_of_context(context, &device) != CUDA_SUCCESS)
        return;
    int index = vgpu_device_index(device);
    CUcontext primary = index == VGPU_NOT_IN_LEASE ? NULL : vgpu_context_primary(index);
    if (primary == NULL)
        return;
    vgpu_primary_note(context, primary, index);
}

/* Makes a green context. Precondition: the caller keeps the primary context alive. */
static CUresult create(CUgreenCtx *green, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    struct vgpu_charge charge;
    CUresult result = vgpu_charge_device(&charge, dev, CLAIM_BYTES);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuGreenCtxCreate, green, desc, dev, flags);
    bool fits = result != CUDA_SUCCESS || !charge.active || !vgpu_overhead_look(charge.device, charge.bytes) ||
                vgpu_overhead_within_limit(charge.device);
    if (!fits) { /* the green context took more than was claimed */
        CALL(cuGreenCtxDestroy, *green);
        vgpu_overhead_look(charge.device, charge.bytes);
    }
    vgpu_charge_undo(&charge, result);
    return fits ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

VGPU_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    vgpu_suspended_call();
    CUcontext primary;
    /* cuDevicePrimaryCtxRetain is libvgpu's wrapper here, which claims memory */
    CUresult result = cuDevicePrimaryCtxRetain(&primary, dev);
    if (result != CUDA_SUCCESS)
        return result;
    result = create(phCtx, desc, dev, flags);
    cuDevicePrimaryCtxRelease_v2(dev);
    return result;
}

VGPU_EXPORT CUresult cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuCtxFromGreenCtx, pContext, hCtx);
    if (result == CUDA_SUCCESS) {
        note(*pContext);
        vgpu_in_flight_note(*pContext);
    }
    return result;
}

/* Finds the device of a green context. Returns false if it has none; the driver then reports the error. */
static bool device_of(CUgreenCtx green, CUcontext *context, CUdevice *device)
{
    return green != NULL && CALL(cuCtxFromGreenCtx, context, green) == CUDA_SUCCESS &&
           vgpu_device_of_context(*context, device) == CUDA_SUCCESS;
}

static void ended(CUcontext context, CUdevice device)
{
    bool limited;
    vgpu_primary_forget(context);
    vgpu_context_look(device);
    if (vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited && vgpu_device_index(device) != VGPU_NOT_IN_LEASE)
        vgpu_overhead_look(vgpu_device_index(device), 0);
}

VGPU_EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    vgpu_suspended_call();
    CUcontext context = NULL;
    CUdevice device;
    bool known = device_of(hCtx, &context, &device);
    if (known)
        vgpu_in_flight_forget(context);
    CUresult result = CALL(cuGreenCtxDestroy, hCtx);
    if (result == CUDA_SUCCESS && known) {
        vgpu_capture_forget(context);
        vgpu_module_forget();
        ended(context, device);
    }
    return result;
}

VGPU_EXPORT CUresult cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)
{
    vgpu_suspended_call();
    struct vgpu_charge charge = {.active = false};
    CUcontext context;
    CUdevice device;
    CUresult result = CUDA_SUCCESS;
    if (device_of(greenCtx, &context, &device))
        result = vgpu_charge_device(&charge, device, VGPU_PAGE_BYTES);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuGreenCtxStreamCreate, phStream, greenCtx, flags, priority);
    if (result == CUDA_SUCCESS && charge.active)
        vgpu_overhead_look(charge.device, charge.bytes);
    vgpu_charge_undo(&charge, result);
    return result;
}

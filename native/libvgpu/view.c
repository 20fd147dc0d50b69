/* view.c: what the tenant is told about its memory: the slice. */
#include "device.h"
#include "functions.h"
#include "tenant.h"

VGPU_EXPORT CUresult cuInit(unsigned int flags)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    return result == CUDA_SUCCESS ? CALL(cuInit, flags) : result;
}

struct slice {
    uint64_t total;
    uint64_t free;
};

/* The slice as the tenant sees it; `card` is what the driver said, which can only be the smaller. */
static struct slice slice_of(unsigned device, struct slice card)
{
    uint64_t limit = vgpu_tenant_limit(device);
    uint64_t used = vgpu_account_sum(vgpu_tenant_account()->usage, device);
    struct slice slice = {.total = limit < card.total ? limit : card.total,
                          .free = used < limit ? limit - used : 0};
    slice.free = slice.free < card.free ? slice.free : card.free;
    return slice;
}

/* Index of the current context's device, or VGPU_NOT_IN_LEASE if the driver's own figures stand. */
static int limited_current(void)
{
    CUdevice device;
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited || vgpu_device_current(&device) != CUDA_SUCCESS)
        return VGPU_NOT_IN_LEASE;
    return vgpu_device_index(device);
}

/* The first version counts in 32 bits: it answers what fits. */
static unsigned narrow(uint64_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes;
}

VGPU_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    CUresult result = CALL(cuMemGetInfo_v2, free, total);
    int device = result == CUDA_SUCCESS ? limited_current() : VGPU_NOT_IN_LEASE;
    if (device == VGPU_NOT_IN_LEASE)
        return result;
    struct slice card = {.total = total != NULL ? *total : UINT64_MAX, .free = free != NULL ? *free : UINT64_MAX};
    struct slice slice = slice_of((unsigned)device, card);
    if (free != NULL)
        *free = slice.free;
    if (total != NULL)
        *total = slice.total;
    return result;
}

VGPU_EXPORT CUresult cuMemGetInfo(unsigned int *free, unsigned int *total)
{
    CUresult result = CALL(cuMemGetInfo, free, total);
    int device = result == CUDA_SUCCESS ? limited_current() : VGPU_NOT_IN_LEASE;
    if (device == VGPU_NOT_IN_LEASE)
        return result;
    struct slice card = {.total = total != NULL ? *total : UINT32_MAX, .free = free != NULL ? *free : UINT32_MAX};
    struct slice slice = slice_of((unsigned)device, card);
    if (free != NULL)
        *free = narrow(slice.free);
    if (total != NULL)
        *total = narrow(slice.total);
    return result;
}

static uint64_t slice_total(CUdevice dev, uint64_t card)
{
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return card;
    int device = vgpu_device_index(dev);
    if (device == VGPU_NOT_IN_LEASE)
        return card;
    uint64_t limit = vgpu_tenant_limit((unsigned)device);
    return limit < card ? limit : card;
}

VGPU_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult result = CALL(cuDeviceTotalMem_v2, bytes, dev);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = slice_total(dev, *bytes);
    return result;
}

VGPU_EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
    CUresult result = CALL(cuDeviceTotalMem, bytes, dev);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = narrow(slice_total(dev, *bytes));
    return result;
}

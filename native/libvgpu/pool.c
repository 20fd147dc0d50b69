/*
 * pool.c: stream-ordered allocations and memory pools. First cut: the requests are charged, from the
 * call to the enqueued free. What a pool holds beyond live requests (its release threshold, rounding to
 * its blocks, a free that has not run yet) is not; hooks.def lists that as open.
 */
#include "charge.h"
#include "device.h"
#include "functions.h"
#include "tenant.h"

/* The wrappers know a pool's device from the call that gave it; -1 as device: host memory. */
static void note_pool(CUmemoryPool pool, int cuda_device)
{
    struct vgpu_entry entry = {.kind = VGPU_KIND_POOL, .key = (uint64_t)(uintptr_t)pool, .device = cuda_device};
    bool limited;
    if (vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited)
        vgpu_table_put(&entry);
}

static int location_device(const CUmemLocation *location)
{
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : -1;
}

static CUresult charge_pool(struct vgpu_charge *charge, CUmemoryPool pool, CUstream stream, int per_thread,
                            uint64_t bytes)
{
    struct vgpu_entry known;
    if (!vgpu_table_get(VGPU_KIND_POOL, (uint64_t)(uintptr_t)pool, &known))
        return vgpu_charge_stream(charge, stream, per_thread, bytes);
    charge->active = false;
    return known.device < 0 ? CUDA_SUCCESS : vgpu_charge_device(charge, known.device, bytes);
}

static CUresult settle(struct vgpu_charge *charge, CUresult result, const CUdeviceptr *dptr, CUstream stream)
{
    bool keep;
    struct vgpu_entry entry = {.kind = VGPU_KIND_STREAM_POINTER};
    if (charge->active && result == CUDA_SUCCESS)
        entry.key = *dptr;
    result = vgpu_charge_settle(charge, result, &entry, &keep);
    if (!keep)
        CALL(cuMemFreeAsync, *dptr, stream);
    return result;
}

#define ALLOC_ASYNC(symbol, per_thread)                                                            \
    VGPU_EXPORT CUresult symbol(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)              \
    {                                                                                              \
        struct vgpu_charge charge;                                                                 \
        CUresult result = vgpu_charge_stream(&charge, hStream, per_thread, bytesize);              \
        if (result != CUDA_SUCCESS)                                                                \
            return result;                                                                         \
        return settle(&charge, CALL(symbol, dptr, bytesize, hStream), dptr, hStream);              \
    }

#define ALLOC_FROM_POOL(symbol, per_thread)                                                        \
    VGPU_EXPORT CUresult symbol(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) \
    {                                                                                              \
        struct vgpu_charge charge;                                                                 \
        CUresult result = charge_pool(&charge, pool, hStream, per_thread, bytesize);               \
        if (result != CUDA_SUCCESS)                                                                \
            return result;                                                                         \
        return settle(&charge, CALL(symbol, dptr, bytesize, pool, hStream), dptr, hStream);        \
    }

#define FREE_ASYNC(symbol)                                                                         \
    VGPU_EXPORT CUresult symbol(CUdeviceptr dptr, CUstream hStream)                                \
    {                                                                                              \
        struct vgpu_entry entry;                                                                   \
        bool taken = vgpu_table_take(VGPU_KIND_STREAM_POINTER, dptr, &entry) ||                    \
                     vgpu_table_take(VGPU_KIND_POINTER, dptr, &entry);                             \
        CUresult result = CALL(symbol, dptr, hStream);                                             \
        vgpu_charge_freed(&entry, taken, result);                                                  \
        return result;                                                                             \
    }

ALLOC_ASYNC(cuMemAllocAsync, 0)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, 1)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, 0)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, 1)
FREE_ASYNC(cuMemFreeAsync)
FREE_ASYNC(cuMemFreeAsync_ptsz)

VGPU_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    CUresult result = CALL(cuMemPoolCreate, pool, poolProps);
    if (result == CUDA_SUCCESS)
        note_pool(*pool, location_device(&poolProps->location));
    return result;
}

VGPU_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    struct vgpu_entry entry;
    vgpu_table_take(VGPU_KIND_POOL, (uint64_t)(uintptr_t)pool, &entry);
    return CALL(cuMemPoolDestroy, pool);
}

VGPU_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    CUresult result = CALL(cuDeviceGetDefaultMemPool, pool_out, dev);
    if (result == CUDA_SUCCESS)
        note_pool(*pool_out, dev);
    return result;
}

VGPU_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    struct vgpu_entry known;
    CUresult result = CALL(cuDeviceGetMemPool, pool, dev);
    /* the device's current pool may be one that the program made elsewhere: its true device is known */
    if (result == CUDA_SUCCESS && !vgpu_table_get(VGPU_KIND_POOL, (uint64_t)(uintptr_t)*pool, &known))
        note_pool(*pool, dev);
    return result;
}

VGPU_EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
    CUresult result = CALL(cuMemGetDefaultMemPool, pool_out, location, type);
    if (result == CUDA_SUCCESS)
        note_pool(*pool_out, location_device(location));
    return result;
}

VGPU_EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    struct vgpu_entry known;
    CUresult result = CALL(cuMemGetMemPool, pool, location, type);
    if (result == CUDA_SUCCESS && !vgpu_table_get(VGPU_KIND_POOL, (uint64_t)(uintptr_t)*pool, &known))
        note_pool(*pool, location_device(location));
    return result;
}

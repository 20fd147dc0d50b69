/* Allocation in order with a stream. */
#include "api.h"

static CUresult allocate(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUcontext ctx)
{
    cu_lock();
    CUresult result = pool == NULL ? cu_pool_of_device(ctx->ordinal, &pool) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = cu_alloc(ctx, SIM_POOL, pool, size, out);
    cu_unlock();
    return result;
}

CUresult PTSZ(cuMemAllocAsync)(CUdeviceptr *out, size_t size, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemAllocAsync", stream, &ctx));
    CU_CHECK(out != NULL && size > 0, CUDA_ERROR_INVALID_VALUE);
    return allocate(out, size, NULL, ctx);
}

CUresult PTSZ(cuMemAllocFromPoolAsync)(CUdeviceptr *out, size_t size, CUmemoryPool pool,
                                       CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemAllocFromPoolAsync", stream, &ctx));
    CU_CHECK(out != NULL && size > 0 && pool != NULL && pool->magic == CU_POOL,
             CUDA_ERROR_INVALID_VALUE);
    return allocate(out, size, pool, ctx);
}

CUresult PTSZ(cuMemFreeAsync)(CUdeviceptr p, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemFreeAsync", stream, &ctx));
    if (p == 0)
        return CUDA_ERROR_INVALID_VALUE;
    cu_lock();
    CUresult result = cu_free(p);
    cu_unlock();
    return result;
}

CUresult PTSZ(cuMemPrefetchAsync_v2)(CUdeviceptr p, size_t size, CUmemLocation location,
                                     unsigned int flags, CUstream stream)
{
    CUcontext ctx;
    (void)location;
    CU_TRY(enter_stream("cuMemPrefetchAsync_v2", stream, &ctx));
    CU_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return cu_check_device_range(p, size);
}

CUresult PTSZ(cuMemPrefetchAsync)(CUdeviceptr p, size_t size, CUdevice dev, CUstream stream)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
    return PTSZ(cuMemPrefetchAsync_v2)(p, size, location, 0, stream);
}

/* Allocation in order with a stream. */
#include "api.h"
#include "graph.h"

/* Adds an allocation node that follows what the stream has captured. */
static CUresult capture_alloc(CUdeviceptr *out, size_t size, CUcontext ctx, CUstream stream)
{
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ctx->ordinal}},
        .bytesize = size};
    const struct cu_capture *c = cu_capture_find(stream);
    CU_CHECK(!c->invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    const CUgraphNode *before;
    size_t count;
    cu_lock();
    cu_capture_list(stream, &before, &count);
    CUresult result = cu_graph_add_alloc(c->graph, before, count, &params, &node);
    if (result == CUDA_SUCCESS)
        cu_capture_frontier(stream, node);
    cu_unlock();
    *out = params.dptr;
    return result;
}

static CUresult capture_free(CUdeviceptr p, CUstream stream)
{
    CUgraphNode node;
    const CUgraphNode *before;
    size_t count;
    const struct cu_capture *c = cu_capture_find(stream);
    CU_CHECK(!c->invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    cu_lock();
    cu_capture_list(stream, &before, &count);
    CUresult result = cu_graph_add_free(c->graph, before, count, p, &node);
    if (result == CUDA_SUCCESS)
        cu_capture_frontier(stream, node);
    cu_unlock();
    return result;
}

static CUresult allocate(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUcontext ctx, CUstream stream)
{
    if (cu_capture_find(stream) != NULL)
        return capture_alloc(out, size, ctx, stream);
    CU_TRY(cu_capture_unsafe());
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
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = 0;
    if (size == 0) /* for 0 bytes the driver does nothing and returns no error */
        return CUDA_SUCCESS;
    return allocate(out, size, NULL, ctx, own(stream));
}

CUresult PTSZ(cuMemAllocFromPoolAsync)(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemAllocFromPoolAsync", stream, &ctx));
    CU_CHECK(out != NULL && size > 0 && pool != NULL && pool->magic == CU_POOL && !pool->imported,
             CUDA_ERROR_INVALID_VALUE);
    return allocate(out, size, pool, ctx, own(stream));
}

CUresult PTSZ(cuMemFreeAsync)(CUdeviceptr p, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemFreeAsync", stream, &ctx));
    if (p == 0)
        return CUDA_SUCCESS;
    if (cu_capture_find(own(stream)) != NULL)
        return capture_free(p, own(stream));
    CU_TRY(cu_capture_unsafe());
    cu_lock();
    CUresult result = cu_free(p);
    cu_unlock();
    return result;
}

CUresult PTSZ(cuMemPrefetchAsync_v2)(CUdeviceptr p, size_t size, CUmemLocation location, unsigned int flags,
                                     CUstream stream)
{
    CUcontext ctx;
    (void)location;
    CU_TRY(enter_stream("cuMemPrefetchAsync_v2", stream, &ctx));
    CU_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_capture_refuse(own(stream)));
    return cu_check_device_range(p, size);
}

CUresult PTSZ(cuMemPrefetchAsync)(CUdeviceptr p, size_t size, CUdevice dev, CUstream stream)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
    return PTSZ(cuMemPrefetchAsync_v2)(p, size, location, 0, stream);
}

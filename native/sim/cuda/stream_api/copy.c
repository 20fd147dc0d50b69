/* cuMemcpy*, in order with their stream. */
#include "api.h"
#include "graph.h"

/* While the stream captures, a copy becomes a node. */
static bool captures(CUstream stream)
{
    return cu_capture_find(own(stream)) != NULL;
}

static CUresult capture_3d(CUstream stream, CUcontext ctx, const CUDA_MEMCPY3D *copy)
{
    CUgraphNode node;
    CU_CHECK(copy != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_capture_add(own(stream), CU_GRAPH_NODE_TYPE_MEMCPY, &node));
    node->copy.shape = *copy;
    node->copy.ctx = ctx;
    return CUDA_SUCCESS;
}

static CUresult capture_line(CUstream stream, CUcontext ctx, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CUDA_MEMCPY3D line = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                          .srcDevice = from,
                          .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                          .dstDevice = to,
                          .WidthInBytes = size,
                          .Height = 1,
                          .Depth = 1};
    return capture_3d(stream, ctx, &line);
}

static CUresult to_device(CUdeviceptr to, const void *from, size_t size)
{
    CU_TRY(cu_check_device_range(to, size));
    return cu_copy((void *)to, from, size);
}

static CUresult to_host(void *to, CUdeviceptr from, size_t size)
{
    CU_TRY(cu_check_device_range(from, size));
    return cu_copy(to, (const void *)from, size);
}

static CUresult between(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CU_TRY(cu_check_device_range(to, size));
    return to_host((void *)to, from, size);
}

CUresult PTDS(cuMemcpyHtoD_v2)(CUdeviceptr to, const void *from, size_t size)
{
    CU_TRY(enter_sync("cuMemcpyHtoD_v2"));
    return size == 0 ? CUDA_SUCCESS : to_device(to, from, size);
}

CUresult PTDS(cuMemcpyDtoH_v2)(void *to, CUdeviceptr from, size_t size)
{
    CU_TRY(enter_sync("cuMemcpyDtoH_v2"));
    return size == 0 ? CUDA_SUCCESS : to_host(to, from, size);
}

CUresult PTDS(cuMemcpyDtoD_v2)(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CU_TRY(enter_sync("cuMemcpyDtoD_v2"));
    return size == 0 ? CUDA_SUCCESS : between(to, from, size);
}

CUresult PTDS(cuMemcpy)(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CU_TRY(enter_sync("cuMemcpy"));
    return cu_copy((void *)to, (const void *)from, size);
}

CUresult PTDS(cuMemcpyPeer)(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t size)
{
    CU_TRY(enter_sync("cuMemcpyPeer"));
    CU_CHECK(cu_is_context(to_ctx) && cu_is_context(from_ctx), CUDA_ERROR_INVALID_CONTEXT);
    return between(to, from, size);
}

CUresult PTSZ(cuMemcpyHtoDAsync_v2)(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpyHtoDAsync_v2", stream, &ctx));
    if (captures(stream))
        return capture_line(stream, ctx, to, (CUdeviceptr)from, size);
    return size == 0 ? CUDA_SUCCESS : to_device(to, from, size);
}

CUresult PTSZ(cuMemcpyDtoHAsync_v2)(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpyDtoHAsync_v2", stream, &ctx));
    if (captures(stream))
        return capture_line(stream, ctx, (CUdeviceptr)to, from, size);
    return size == 0 ? CUDA_SUCCESS : to_host(to, from, size);
}

CUresult PTSZ(cuMemcpyDtoDAsync_v2)(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpyDtoDAsync_v2", stream, &ctx));
    if (captures(stream))
        return capture_line(stream, ctx, to, from, size);
    return size == 0 ? CUDA_SUCCESS : between(to, from, size);
}

CUresult PTSZ(cuMemcpyAsync)(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpyAsync", stream, &ctx));
    if (captures(stream))
        return capture_line(stream, ctx, to, from, size);
    return cu_copy((void *)to, (const void *)from, size);
}

CUresult PTSZ(cuMemcpyPeerAsync)(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t size,
                                 CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpyPeerAsync", stream, &ctx));
    if (captures(stream))
        return capture_line(stream, ctx, to, from, size);
    CU_CHECK(cu_is_context(to_ctx) && cu_is_context(from_ctx), CUDA_ERROR_INVALID_CONTEXT);
    return between(to, from, size);
}

static CUDA_MEMCPY3D widen(const CUDA_MEMCPY2D *c)
{
    return (CUDA_MEMCPY3D){.srcXInBytes = c->srcXInBytes,
                           .srcY = c->srcY,
                           .srcMemoryType = c->srcMemoryType,
                           .srcHost = c->srcHost,
                           .srcDevice = c->srcDevice,
                           .srcArray = c->srcArray,
                           .srcPitch = c->srcPitch == 0 ? c->WidthInBytes : c->srcPitch,
                           .dstXInBytes = c->dstXInBytes,
                           .dstY = c->dstY,
                           .dstMemoryType = c->dstMemoryType,
                           .dstHost = c->dstHost,
                           .dstDevice = c->dstDevice,
                           .dstArray = c->dstArray,
                           .dstPitch = c->dstPitch == 0 ? c->WidthInBytes : c->dstPitch,
                           .WidthInBytes = c->WidthInBytes,
                           .Height = c->Height,
                           .Depth = 1};
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c)
{
    CU_CHECK(c != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_MEMCPY3D full = widen(c);
    return cu_copy_3d(&full);
}

CUresult PTDS(cuMemcpy2D_v2)(const CUDA_MEMCPY2D *copy)
{
    CU_TRY(enter_sync("cuMemcpy2D_v2"));
    return copy_2d(copy);
}

CUresult PTDS(cuMemcpy2DUnaligned_v2)(const CUDA_MEMCPY2D *copy)
{
    CU_TRY(enter_sync("cuMemcpy2DUnaligned_v2"));
    return copy_2d(copy);
}

CUresult PTSZ(cuMemcpy2DAsync_v2)(const CUDA_MEMCPY2D *copy, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpy2DAsync_v2", stream, &ctx));
    if (captures(stream) && copy != NULL) {
        CUDA_MEMCPY3D full = widen(copy);
        return capture_3d(stream, ctx, &full);
    }
    return copy_2d(copy);
}

CUresult PTDS(cuMemcpy3D_v2)(const CUDA_MEMCPY3D *copy)
{
    CU_TRY(enter_sync("cuMemcpy3D_v2"));
    return cu_copy_3d(copy);
}

CUresult PTSZ(cuMemcpy3DAsync_v2)(const CUDA_MEMCPY3D *copy, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuMemcpy3DAsync_v2", stream, &ctx));
    if (captures(stream))
        return capture_3d(stream, ctx, copy);
    return cu_copy_3d(copy);
}

static CUresult array_at(CUarray array, size_t offset, size_t size, void **out)
{
    CU_CHECK(array != NULL && array->magic == CU_ARRAY, CUDA_ERROR_INVALID_HANDLE);
    *out = (void *)(array->data + offset);
    return cu_check_device_range(array->data + offset, size);
}

CUresult PTDS(cuMemcpyHtoA_v2)(CUarray to, size_t offset, const void *from, size_t size)
{
    void *at;
    CU_TRY(enter_sync("cuMemcpyHtoA_v2"));
    CU_TRY(array_at(to, offset, size, &at));
    return cu_copy(at, from, size);
}

CUresult PTDS(cuMemcpyAtoH_v2)(void *to, CUarray from, size_t offset, size_t size)
{
    void *at;
    CU_TRY(enter_sync("cuMemcpyAtoH_v2"));
    CU_TRY(array_at(from, offset, size, &at));
    return cu_copy(to, at, size);
}

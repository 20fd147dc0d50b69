/* cuMemset*, in order with their stream. */
#include "api.h"
#include "graph.h"

static CUresult capture(CUstream stream, CUcontext ctx, CUDA_MEMSET_NODE_PARAMS shape)
{
    CUgraphNode node;
    CU_TRY(cu_capture_add(own(stream), CU_GRAPH_NODE_TYPE_MEMSET, &node));
    node->set.shape = shape;
    node->set.ctx = ctx;
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr to, const void *value, size_t width, size_t count)
{
    return cu_fill_rows(to, 0, value, width, count, 1);
}

static bool captures(CUstream stream)
{
    return cu_capture_find(own(stream)) != NULL;
}

#define SETTERS(bits, type)                                                                                       \
    CUresult PTDS(cuMemsetD##bits##_v2)(CUdeviceptr to, type value, size_t count)                                 \
    {                                                                                                             \
        CU_TRY(enter_sync("cuMemsetD" #bits "_v2"));                                                              \
        return fill(to, &value, sizeof(value), count);                                                            \
    }                                                                                                             \
    CUresult PTSZ(cuMemsetD##bits##Async)(CUdeviceptr to, type value, size_t count, CUstream stream)              \
    {                                                                                                             \
        CUcontext ctx;                                                                                            \
        CU_TRY(enter_stream("cuMemsetD" #bits "Async", stream, &ctx));                                            \
        if (captures(stream))                                                                                     \
            return capture(stream, ctx, (CUDA_MEMSET_NODE_PARAMS){to, 0, value, sizeof(value), count, 1});        \
        return fill(to, &value, sizeof(value), count);                                                            \
    }                                                                                                             \
    CUresult PTDS(cuMemsetD2D##bits##_v2)(CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows)    \
    {                                                                                                             \
        CU_TRY(enter_sync("cuMemsetD2D" #bits "_v2"));                                                            \
        return cu_fill_rows(to, pitch, &value, sizeof(value), width, rows);                                       \
    }                                                                                                             \
    CUresult PTSZ(cuMemsetD2D##bits##Async)(CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows,  \
                                            CUstream stream)                                                      \
    {                                                                                                             \
        CUcontext ctx;                                                                                            \
        CU_TRY(enter_stream("cuMemsetD2D" #bits "Async", stream, &ctx));                                          \
        if (captures(stream))                                                                                     \
            return capture(stream, ctx, (CUDA_MEMSET_NODE_PARAMS){to, pitch, value, sizeof(value), width, rows}); \
        return cu_fill_rows(to, pitch, &value, sizeof(value), width, rows);                                       \
    }

SETTERS(8, unsigned char)
SETTERS(16, unsigned short)
SETTERS(32, unsigned int)

/* fake_new.c: functions that CUDA 13.1 to 13.5 added, and two functions that only tests use. */
#include "fake.h"

/* A function that only a driver newer than libvgpu's table has. */
API CUresult cuMemTeleport(CUdeviceptr to)
{
    (void)to;
    return CUDA_SUCCESS;
}

static int capturing;
static int asked;

/* Returns how often libvgpu has asked whether a stream is being captured. libvgpu asks only while it knows of a
 * capture.
 */
API int fake_capture_questions(void)
{
    return asked;
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    asked++;
    *status = capturing > 0 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

API CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                           CUgraphRecaptureCallback callback, void *data)
{
    (void)stream, (void)mode, (void)graph, (void)callback, (void)data;
    capturing++;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    (void)stream;
    return cuCtxGetCurrent(context);
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    (void)stream;
    capturing = 0; /* destroying a stream ends its capture */
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    capturing--;
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return cuStreamEndCapture(stream, graph);
}

API CUresult cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *parameters)
{
    (void)stream, (void)parameters;
    capturing++;
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCaptureToCig(CUstream stream)
{
    (void)stream;
    capturing--;
    return CUDA_SUCCESS;
}

API CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                               const CUgraphEdgeData *edges, size_t number, CUgraphNodeParams *parameters)
{
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = parameters->alloc.poolProps,
                                         .bytesize = parameters->alloc.bytesize};
    (void)edges;
    return parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC
               ? cuGraphAddMemAllocNode(node, graph, dependencies, number, &memory)
               : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemcpyWithAttributesAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes,
                                         CUstream stream)
{
    (void)to, (void)from, (void)bytes, (void)attributes, (void)stream;
    return CUDA_SUCCESS;
}

API CUresult cuMemcpy3DWithAttributesAsync(CUDA_MEMCPY3D_BATCH_OP *copy, unsigned long long flags, CUstream stream)
{
    (void)copy, (void)flags, (void)stream;
    return CUDA_SUCCESS;
}

API CUresult cuMemcpy3DBatchAsync_v2(size_t number, CUDA_MEMCPY3D_BATCH_OP *copies, unsigned long long flags,
                                     CUstream stream)
{
    (void)number, (void)copies, (void)flags, (void)stream;
    return CUDA_SUCCESS;
}

API CUresult cuFabricCpyBatchAsync(size_t number, CUDA_FABRIC_COPY_BATCH_OP *copies, unsigned long long flags,
                                   CUstream stream)
{
    (void)number, (void)copies, (void)flags, (void)stream;
    return CUDA_SUCCESS;
}

/* Graphs and captures: the calls that take a stream. */
#include "api.h"
#include "graph.h"

CUresult PTSZ(cuGraphInstantiateWithParams)(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphInstantiateWithParams"));
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_graph_instantiate(graph, params->flags, exec);
    cu_unlock();
    params->hErrNode_out = NULL;
    params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

CUresult PTSZ(cuGraphUpload)(CUgraphExec exec, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuGraphUpload", stream, &ctx));
    return cu_check_exec(exec);
}

static CUresult capture_launch(CUgraphExec exec, CUstream stream)
{
    CUgraphNode node;
    CU_CHECK(!exec->graph->has_memory, CUDA_ERROR_NOT_SUPPORTED);
    CU_TRY(cu_capture_add(stream, CU_GRAPH_NODE_TYPE_GRAPH, &node));
    cu_lock();
    CUresult result = cu_graph_clone(exec->graph, false, &node->child);
    if (result == CUDA_SUCCESS)
        node->child->parent = node;
    cu_unlock();
    return result;
}

CUresult PTSZ(cuGraphLaunch)(CUgraphExec exec, CUstream stream)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuGraphLaunch", stream, &ctx));
    CU_TRY(cu_check_exec(exec));
    if (cu_capture_find(own(stream)) != NULL)
        return capture_launch(exec, own(stream));
    return cu_graph_launch(exec, own(stream));
}

static CUresult begin(const char *function, CUstream stream, CUgraph graph, const CUgraphNode *before, size_t count,
                      CUstreamCaptureMode mode)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context(function, &ctx));
    CU_CHECK(own(stream) != CU_STREAM_LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CU_TRY(enter_stream(function, stream, &ctx));
    cu_lock();
    CUresult result = cu_capture_begin(own(stream), graph, before, count, mode);
    cu_unlock();
    return result;
}

CUresult PTSZ(cuStreamBeginCapture_v2)(CUstream stream, CUstreamCaptureMode mode)
{
    return begin("cuStreamBeginCapture_v2", stream, NULL, NULL, 0, mode);
}

CUresult PTSZ(cuStreamBeginCapture)(CUstream stream)
{
    return begin("cuStreamBeginCapture", stream, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult PTSZ(cuStreamBeginCaptureToGraph)(CUstream stream, CUgraph graph, const CUgraphNode *before,
                                           const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode)
{
    (void)data;
    CU_CHECK(cu_is_graph(graph) && (count == 0 || before != NULL), CUDA_ERROR_INVALID_VALUE);
    return begin("cuStreamBeginCaptureToGraph", stream, graph, before, count, mode);
}

CUresult PTSZ(cuStreamEndCapture)(CUstream stream, CUgraph *graph)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamEndCapture", stream, &ctx));
    CU_CHECK(graph != NULL, CUDA_ERROR_INVALID_VALUE);
    *graph = NULL;
    cu_lock();
    CUresult result = cu_capture_end(own(stream), graph);
    cu_unlock();
    return result;
}

/*
 * A query does not count as use of the stream. (Only a use of the legacy stream gives
 * CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.)
 */
CUresult PTSZ(cuStreamGetCaptureInfo_v3)(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                         const CUgraphNode **before, const CUgraphEdgeData **data, size_t *count)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamGetCaptureInfo_v3", stream, &ctx));
    CU_CHECK(status != NULL, CUDA_ERROR_INVALID_VALUE);
    CUstream s = own(stream);
    const struct cu_capture *c = cu_capture_find(s);
    *status = c == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
              : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                           : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (c == NULL || c->invalid)
        return CUDA_SUCCESS;
    if (id != NULL)
        *id = c->id;
    if (graph != NULL)
        *graph = c->graph;
    cu_capture_list(s, before, count);
    if (data != NULL)
        *data = NULL;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamGetCaptureInfo_v2)(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                         const CUgraphNode **before, size_t *count)
{
    return PTSZ(cuStreamGetCaptureInfo_v3)(stream, status, id, graph, before, NULL, count);
}

CUresult PTSZ(cuStreamGetCaptureInfo)(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    return PTSZ(cuStreamGetCaptureInfo_v3)(stream, status, id, NULL, NULL, NULL, NULL);
}

CUresult PTSZ(cuStreamIsCapturing)(CUstream stream, CUstreamCaptureStatus *status)
{
    return PTSZ(cuStreamGetCaptureInfo_v3)(stream, status, NULL, NULL, NULL, NULL, NULL);
}

CUresult PTSZ(cuStreamUpdateCaptureDependencies_v2)(CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *data,
                                                    size_t count, unsigned int flags)
{
    CUcontext ctx;
    (void)data;
    CU_TRY(enter_stream("cuStreamUpdateCaptureDependencies_v2", stream, &ctx));
    CU_CHECK(flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES && (count == 0 || nodes != NULL), CUDA_ERROR_INVALID_VALUE);
    const struct cu_capture *c = cu_capture_find(own(stream));
    CU_CHECK(c != NULL, CUDA_ERROR_ILLEGAL_STATE);
    for (size_t i = 0; i < count; i++)
        CU_CHECK(cu_is_node(nodes[i]) && nodes[i]->graph == c->graph, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_capture_set(own(stream), nodes, count, flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
    cu_unlock();
    return result;
}

CUresult PTSZ(cuStreamUpdateCaptureDependencies)(CUstream stream, CUgraphNode *nodes, size_t count, unsigned int flags)
{
    return PTSZ(cuStreamUpdateCaptureDependencies_v2)(stream, nodes, NULL, count, flags);
}

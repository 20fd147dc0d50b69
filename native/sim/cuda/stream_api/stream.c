/* Streams and events: the calls that take a stream. */
#include "api.h"
#include "graph.h"

CUresult PTSZ(cuStreamSynchronize)(CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamSynchronize"));
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_TRY(cu_capture_refuse(own(stream)));
    CU_TRY(cu_capture_unsafe());
    CU_TRY(cu_wait(ctx, position));
    cu_pending_resolve(ctx);
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamQuery)(CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamQuery"));
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_TRY(cu_capture_refuse(own(stream)));
    CU_TRY(cu_capture_unsafe());
    return cu_reached(ctx, position) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult capture_event(CUgraphNodeType type, CUevent event, CUstream stream)
{
    CUgraphNode node;
    CU_TRY(cu_capture_add(stream, type, &node));
    node->event = event;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamWaitEvent", stream, &ctx));
    CU_TRY(cu_check_event(event));
    bool capturing = cu_capture_find(own(stream)) != NULL;
    if (capturing && (flags & CU_EVENT_WAIT_EXTERNAL) != 0)
        return capture_event(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, own(stream));
    if (capturing || cu_capture_has(event))
        return cu_capture_wait(own(stream), event);
    return cu_event_wait(event, own(stream));
}

static CUresult record(const char *function, CUevent event, CUstream stream, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter(function));
    CU_TRY(cu_check_event(event));
    CU_TRY(enter_stream(function, stream, &ctx));
    if (cu_capture_find(own(stream)) == NULL)
        return cu_event_record(event, own(stream));
    CU_CHECK(event->ctx == ctx, CUDA_ERROR_INVALID_HANDLE);
    if ((flags & CU_EVENT_RECORD_EXTERNAL) != 0)
        return capture_event(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, own(stream));
    return cu_capture_record(event, own(stream));
}

CUresult PTSZ(cuEventRecord)(CUevent event, CUstream stream)
{
    return record("cuEventRecord", event, stream, 0);
}

CUresult PTSZ(cuEventRecordWithFlags)(CUevent event, CUstream stream, unsigned int flags)
{
    return record("cuEventRecordWithFlags", event, stream, flags);
}

CUresult PTSZ(cuStreamGetCtx)(CUstream stream, CUcontext *out)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter_suspended("cuStreamGetCtx"));
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = cu_stream_view(own(stream), ctx);
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamGetCtx_v2)(CUstream stream, CUcontext *out, CUgreenCtx *green)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamGetCtx_v2", stream, &ctx));
    CU_CHECK(out != NULL && green != NULL, CUDA_ERROR_INVALID_VALUE);
    *green = cu_stream_view(own(stream), ctx)->green;
    *out = ctx;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamGetFlags)(CUstream stream, unsigned int *flags)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamGetFlags", stream, &ctx));
    CU_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = (uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD ? 0 : stream->flags;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamGetPriority)(CUstream stream, int *priority)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamGetPriority", stream, &ctx));
    CU_CHECK(priority != NULL, CUDA_ERROR_INVALID_VALUE);
    *priority = (uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD ? 0 : stream->priority;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamAttachMemAsync)(CUstream stream, CUdeviceptr p, size_t size, unsigned int flags)
{
    CUcontext ctx;
    (void)size;
    (void)flags;
    CU_TRY(enter_stream("cuStreamAttachMemAsync", stream, &ctx));
    CU_TRY(cu_capture_refuse(own(stream)));
    return cu_check_device_range(p, 1);
}

/* A host function runs when all earlier work of the stream is done: here, before the call returns. */
CUresult PTSZ(cuLaunchHostFunc)(CUstream stream, CUhostFn function, void *data)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuLaunchHostFunc"));
    CU_CHECK(function != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    if (cu_capture_find(own(stream)) != NULL) {
        CUgraphNode node;
        CU_TRY(cu_capture_add(own(stream), CU_GRAPH_NODE_TYPE_HOST, &node));
        node->host = (CUDA_HOST_NODE_PARAMS){function, data};
        return CUDA_SUCCESS;
    }
    CU_TRY(cu_wait(ctx, position));
    function(data);
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamAddCallback)(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamAddCallback"));
    CU_CHECK(callback != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_TRY(cu_capture_refuse(own(stream)));
    CU_TRY(cu_wait(ctx, position));
    callback(stream, CUDA_SUCCESS, data);
    return CUDA_SUCCESS;
}

/* Streams and events: the calls that take a stream. */
#include "api.h"

CUresult PTSZ(cuStreamSynchronize)(CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamSynchronize"));
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
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
    return cu_reached(ctx, position) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult PTSZ(cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned int flags)
{
    CUcontext ctx;
    double position;
    (void)flags;
    CU_TRY(cu_enter("cuStreamWaitEvent"));
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    if (event->recorded && event->ctx == ctx && event->position > position)
        cu_stream_advance(own(stream), ctx, event->position);
    return CUDA_SUCCESS;
}

static CUresult record(const char *function, CUevent event, CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter(function));
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_CHECK(event->ctx == ctx, CUDA_ERROR_INVALID_HANDLE);
    event->position = position;
    event->recorded_ns = sim_now_ns();
    event->recorded = true;
    event->resolved = false;
    cu_pending_add(ctx, event);
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuEventRecord)(CUevent event, CUstream stream)
{
    return record("cuEventRecord", event, stream);
}

CUresult PTSZ(cuEventRecordWithFlags)(CUevent event, CUstream stream, unsigned int flags)
{
    (void)flags;
    return record("cuEventRecordWithFlags", event, stream);
}

CUresult PTSZ(cuStreamGetCtx)(CUstream stream, CUcontext *out)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamGetCtx", stream, &ctx));
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
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

CUresult PTSZ(cuStreamIsCapturing)(CUstream stream, CUstreamCaptureStatus *status)
{
    CUcontext ctx;
    CU_TRY(enter_stream("cuStreamIsCapturing", stream, &ctx));
    CU_CHECK(status != NULL, CUDA_ERROR_INVALID_VALUE);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamAttachMemAsync)(CUstream stream, CUdeviceptr p, size_t size,
                                      unsigned int flags)
{
    CUcontext ctx;
    (void)size;
    (void)flags;
    CU_TRY(enter_stream("cuStreamAttachMemAsync", stream, &ctx));
    return cu_check_device_range(p, 1);
}

/* A host function runs when everything before it in the stream is done: here, before it returns. */
CUresult PTSZ(cuLaunchHostFunc)(CUstream stream, CUhostFn function, void *data)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuLaunchHostFunc"));
    CU_CHECK(function != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_TRY(cu_wait(ctx, position));
    function(data);
    return CUDA_SUCCESS;
}

CUresult PTSZ(cuStreamAddCallback)(CUstream stream, CUstreamCallback callback, void *data,
                                   unsigned int flags)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamAddCallback"));
    CU_CHECK(callback != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(own(stream), &ctx, &position));
    CU_TRY(cu_wait(ctx, position));
    callback(stream, CUDA_SUCCESS, data);
    return CUDA_SUCCESS;
}

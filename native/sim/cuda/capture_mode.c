/*
 * The restrictions that a stream capture imposes on other calls, by the capture's mode and by the calling thread's
 * mode.
 */
#include "graph.h"

_Atomic uint32_t cu_captures; /* number of captures in progress; at 0, other calls take no lock */
struct cu_capture *cu_captures_list;

static _Thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/*
 * Refuses a call that may wait for the device, if a capture's mode and the thread's mode forbid it, and invalidates
 * that capture.
 */
CUresult cu_capture_unsafe(void)
{
    CUresult result = CUDA_SUCCESS;
    if (atomic_load_explicit(&cu_captures, memory_order_relaxed) == 0 || t_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    cu_lock();
    for (struct cu_capture *c = cu_captures_list; c != NULL; c = c->next) {
        bool mine = pthread_equal(c->thread, pthread_self());
        bool counts = mine ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                           : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && t_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!counts)
            continue;
        c->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    cu_unlock();
    return result;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CU_TRY(cu_enter("cuThreadExchangeStreamCaptureMode"));
    CU_CHECK(mode != NULL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode old = t_mode;
    t_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

/* capture.c: begin and end of stream captures, counted. */
#include "capture.h"

#include "away.h"
#include "functions.h"
#include "in_child.h"

static int captures;

bool vgpu_capture_any(void)
{
    return __atomic_load_n(&captures, __ATOMIC_RELAXED) > 0;
}

bool vgpu_capture_on(CUstream stream, int per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!vgpu_capture_any())
        return false;
    CUresult result = per_thread ? CALL(cuStreamIsCapturing_ptsz, stream, &status)
                                 : CALL(cuStreamIsCapturing, stream, &status);
    return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUstreamCaptureMode vgpu_capture_relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CALL(cuThreadExchangeStreamCaptureMode, &mode);
    return mode;
}

void vgpu_capture_restore(CUstreamCaptureMode before)
{
    CALL(cuThreadExchangeStreamCaptureMode, &before);
}

static void reset(void)
{
    captures = 0;
}
VGPU_IN_CHILD(reset);

/* Counted before the driver is asked, so that no marker gets into the gap. */
#define BEGIN_BODY(symbol, ...)                                 \
    do {                                                        \
        vgpu_away_call();                                       \
        __atomic_add_fetch(&captures, 1, __ATOMIC_SEQ_CST);     \
        CUresult result = CALL(symbol, __VA_ARGS__);            \
        if (result != CUDA_SUCCESS)                             \
            __atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST); \
        return result;                                          \
    } while (0)

VGPU_EXPORT CUresult cuStreamBeginCapture(CUstream hStream)
{
    BEGIN_BODY(cuStreamBeginCapture, hStream);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream hStream)
{
    BEGIN_BODY(cuStreamBeginCapture_ptsz, hStream);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
    BEGIN_BODY(cuStreamBeginCapture_v2, hStream, mode);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode)
{
    BEGIN_BODY(cuStreamBeginCapture_v2_ptsz, hStream, mode);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                 CUstreamCaptureMode mode)
{
    BEGIN_BODY(cuStreamBeginCaptureToGraph, hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                                      const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                      CUstreamCaptureMode mode)
{
    BEGIN_BODY(cuStreamBeginCaptureToGraph_ptsz, hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
}

VGPU_EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                   CUgraphRecaptureCallback callbackFunc, void *userData)
{
    BEGIN_BODY(cuStreamBeginRecaptureToGraph, hStream, mode, hGraph, callbackFunc, userData);
}

VGPU_EXPORT CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                        CUgraphRecaptureCallback callbackFunc, void *userData)
{
    BEGIN_BODY(cuStreamBeginRecaptureToGraph_ptsz, hStream, mode, hGraph, callbackFunc, userData);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToCig(CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams)
{
    BEGIN_BODY(cuStreamBeginCaptureToCig, hStream, streamCigCaptureParams);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToCig_ptsz(CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams)
{
    BEGIN_BODY(cuStreamBeginCaptureToCig_ptsz, hStream, streamCigCaptureParams);
}

/* An invalidated capture has ended, too, whatever the driver's answer; one that was not begun has not. */
#define END_BODY(symbol, ...)                                                                         \
    do {                                                                                              \
        vgpu_away_call();                                                                             \
        CUresult result = CALL(symbol, __VA_ARGS__);                                                  \
        if (result != CUDA_ERROR_ILLEGAL_STATE && result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD && \
            result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED && vgpu_capture_any())                      \
            __atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);                                       \
        return result;                                                                                \
    } while (0)

VGPU_EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    END_BODY(cuStreamEndCapture, hStream, phGraph);
}

VGPU_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
    END_BODY(cuStreamEndCapture_ptsz, hStream, phGraph);
}

VGPU_EXPORT CUresult cuStreamEndCaptureToCig(CUstream hStream)
{
    END_BODY(cuStreamEndCaptureToCig, hStream);
}

VGPU_EXPORT CUresult cuStreamEndCaptureToCig_ptsz(CUstream hStream)
{
    END_BODY(cuStreamEndCaptureToCig_ptsz, hStream);
}

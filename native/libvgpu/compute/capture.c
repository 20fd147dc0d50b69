/* capture.c: tracks the beginning and the end of stream captures, by the stream on which each began. */
#include "capture.h"

#include <pthread.h>
#include <stdlib.h>

#include "suspended.h"
#include "clock.h"
#include "functions.h"
#include "in_child.h"

#define FORBIDDEN_MAX_NS 1000000000u /* maximum time for which a beginning capture waits */
#define FORBIDDEN_LOOK_NS 20000

struct capture {
    struct capture *next;
    CUstream stream;
    CUcontext context; /* context of the stream; NULL if it is not known */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *begun; /* list of captures in progress; guarded by `lock` */
/* number of captures in `begun`, those that begin, and those whose stream is being destroyed */
int vgpu_captures;
/*
 * held from vgpu_capture_forbid to vgpu_capture_allow; a thread that begins a capture waits for it, at most
 * FORBIDDEN_MAX_NS
 */
static pthread_mutex_t forbidden = PTHREAD_MUTEX_INITIALIZER;

bool vgpu_capture_forbid(void)
{
    pthread_mutex_lock(&forbidden);
    bool none = __atomic_load_n(&vgpu_captures, __ATOMIC_SEQ_CST) == 0;
    if (!none)
        pthread_mutex_unlock(&forbidden);
    return none;
}

void vgpu_capture_allow(void)
{
    pthread_mutex_unlock(&forbidden);
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
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&forbidden, NULL);
    begun = NULL; /* in a forked child: the driver's objects belong to the parent, and its records stay allocated */
    vgpu_captures = 0;
}
VGPU_IN_CHILD(reset);

/* Unlinks the first capture of `stream`, or all captures of `context`. Does not change their count. */
static struct capture *take(CUstream stream, CUcontext context)
{
    struct capture *taken = NULL;
    pthread_mutex_lock(&lock);
    for (struct capture **link = &begun; *link != NULL;) {
        struct capture *capture = *link;
        if (context != NULL ? capture->context != context : capture->stream != stream) {
            link = &capture->next;
            continue;
        }
        *link = capture->next;
        capture->next = taken;
        taken = capture;
        if (context == NULL)
            break;
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

static void put(struct capture *capture)
{
    pthread_mutex_lock(&lock);
    capture->next = begun;
    begun = capture;
    pthread_mutex_unlock(&lock);
}

static void ended(struct capture *list)
{
    while (list != NULL) {
        struct capture *next = list->next;
        __atomic_sub_fetch(&vgpu_captures, 1, __ATOMIC_SEQ_CST);
        free(list);
        list = next;
    }
}

void vgpu_capture_forget(CUcontext context)
{
    if (context != NULL && vgpu_capture_any())
        ended(take(NULL, context));
}

/* Counts a capture that is beginning. Waits for vgpu_capture_allow(), at most FORBIDDEN_MAX_NS. */
static void count_one(void)
{
    uint64_t until = now_ns() + FORBIDDEN_MAX_NS;
    bool held;
    while (!(held = pthread_mutex_trylock(&forbidden) == 0) && now_ns() < until)
        pause_ns(FORBIDDEN_LOOK_NS);
    __atomic_add_fetch(&vgpu_captures, 1, __ATOMIC_SEQ_CST);
    if (held)
        pthread_mutex_unlock(&forbidden);
}

/*
 * Counts a capture before the driver's call that begins it, so that no marker is recorded in between. Returns NULL if
 * there is no memory for the record.
 */
static struct capture *begin(CUstream stream)
{
    struct capture *capture = calloc(1, sizeof(*capture));
    if (capture == NULL)
        return NULL;
    capture->stream = stream;
    if (CALL(cuStreamGetCtx, stream, &capture->context) != CUDA_SUCCESS)
        capture->context = NULL;
    count_one();
    return capture;
}

static CUresult began(struct capture *capture, CUresult result)
{
    if (result == CUDA_SUCCESS)
        put(capture);
    else
        ended(capture);
    return result;
}

/*
 * Converts the stream argument of a function with the suffix _ptsz, for which NULL means the thread's own stream, to the
 * stream by which this file records captures.
 */
static CUstream per_thread(CUstream stream)
{
    return stream != NULL ? stream : CU_STREAM_PER_THREAD;
}

#define BEGIN_BODY(symbol, stream, ...) BEGIN_AS(symbol, stream, stream, ##__VA_ARGS__)
#define BEGIN_AS(symbol, key, stream, ...)                          \
    do {                                                            \
        vgpu_suspended_call();                                      \
        struct capture *capture = begin(key);                       \
        if (capture == NULL)                                        \
            return CUDA_ERROR_OUT_OF_MEMORY;                        \
        return began(capture, CALL(symbol, stream, ##__VA_ARGS__)); \
    } while (0)

VGPU_EXPORT CUresult cuStreamBeginCapture(CUstream hStream)
{
    BEGIN_BODY(cuStreamBeginCapture, hStream);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream hStream)
{
    BEGIN_AS(cuStreamBeginCapture_ptsz, per_thread(hStream), hStream);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
    BEGIN_BODY(cuStreamBeginCapture_v2, hStream, mode);
}

VGPU_EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode)
{
    BEGIN_AS(cuStreamBeginCapture_v2_ptsz, per_thread(hStream), hStream, mode);
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
    BEGIN_AS(cuStreamBeginCaptureToGraph_ptsz, per_thread(hStream), hStream, hGraph, dependencies, dependencyData,
             numDependencies, mode);
}

VGPU_EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                   CUgraphRecaptureCallback callbackFunc, void *userData)
{
    BEGIN_BODY(cuStreamBeginRecaptureToGraph, hStream, mode, hGraph, callbackFunc, userData);
}

VGPU_EXPORT CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                                                        CUgraphRecaptureCallback callbackFunc, void *userData)
{
    BEGIN_AS(cuStreamBeginRecaptureToGraph_ptsz, per_thread(hStream), hStream, mode, hGraph, callbackFunc, userData);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToCig(CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams)
{
    BEGIN_BODY(cuStreamBeginCaptureToCig, hStream, streamCigCaptureParams);
}

VGPU_EXPORT CUresult cuStreamBeginCaptureToCig_ptsz(CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams)
{
    BEGIN_AS(cuStreamBeginCaptureToCig_ptsz, per_thread(hStream), hStream, streamCigCaptureParams);
}

/*
 * Ends the record of a capture. A capture has ended, also an invalidated one, unless the driver returned one of three
 * errors: no capture, the wrong thread, or a stream on which none began.
 */
#define END_BODY(symbol, stream, ...) END_AS(symbol, stream, stream, ##__VA_ARGS__)
#define END_AS(symbol, key, stream, ...)                                                              \
    do {                                                                                              \
        vgpu_suspended_call();                                                                        \
        CUresult result = CALL(symbol, stream, ##__VA_ARGS__);                                        \
        if (result != CUDA_ERROR_ILLEGAL_STATE && result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD && \
            result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)                                            \
            ended(take(key, NULL));                                                                   \
        return result;                                                                                \
    } while (0)

/*
 * Destroys a stream, which ends the capture that began on it. Its record is removed first, because another stream may
 * get the same handle afterwards.
 */
#define DESTROY_BODY(symbol, stream)                                              \
    do {                                                                          \
        vgpu_suspended_call();                                                    \
        struct capture *capture = vgpu_capture_any() ? take(stream, NULL) : NULL; \
        CUresult result = CALL(symbol, stream);                                   \
        if (result == CUDA_SUCCESS)                                               \
            ended(capture);                                                       \
        else if (capture != NULL)                                                 \
            put(capture);                                                         \
        return result;                                                            \
    } while (0)

VGPU_EXPORT CUresult cuStreamDestroy(CUstream hStream)
{
    DESTROY_BODY(cuStreamDestroy, hStream);
}

VGPU_EXPORT CUresult cuStreamDestroy_v2(CUstream hStream)
{
    DESTROY_BODY(cuStreamDestroy_v2, hStream);
}

VGPU_EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    END_BODY(cuStreamEndCapture, hStream, phGraph);
}

VGPU_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
    END_AS(cuStreamEndCapture_ptsz, per_thread(hStream), hStream, phGraph);
}

VGPU_EXPORT CUresult cuStreamEndCaptureToCig(CUstream hStream)
{
    END_BODY(cuStreamEndCaptureToCig, hStream);
}

VGPU_EXPORT CUresult cuStreamEndCaptureToCig_ptsz(CUstream hStream)
{
    END_AS(cuStreamEndCaptureToCig_ptsz, per_thread(hStream), hStream);
}

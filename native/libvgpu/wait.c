/* wait.c: calls that need nothing of libvgpu but to wait in front of the driver while the lease is away (away.h):
 * those that a thread which has been idle may well begin with. */
#include "away.h"
#include "functions.h"

#define WAITS(symbol, parameters, ...)       \
    VGPU_EXPORT CUresult symbol parameters   \
    {                                        \
        vgpu_away_call();                    \
        return CALL(symbol, __VA_ARGS__);    \
    }

/* And its twin for the per-thread default stream. */
#define WAITS_TWICE(symbol, parameters, ...) \
    WAITS(symbol, parameters, __VA_ARGS__)   \
    WAITS(symbol##_ptsz, parameters, __VA_ARGS__)

WAITS_TWICE(cuEventRecord, (CUevent hEvent, CUstream hStream), hEvent, hStream)
WAITS_TWICE(cuEventRecordWithFlags, (CUevent hEvent, CUstream hStream, unsigned int flags), hEvent, hStream, flags)
WAITS(cuEventQuery, (CUevent hEvent), hEvent)
WAITS(cuEventCreate, (CUevent *phEvent, unsigned int Flags), phEvent, Flags)
WAITS_TWICE(cuStreamQuery, (CUstream hStream), hStream)
WAITS_TWICE(cuStreamWaitEvent, (CUstream hStream, CUevent hEvent, unsigned int Flags), hStream, hEvent, Flags)
WAITS_TWICE(cuStreamIsCapturing, (CUstream hStream, CUstreamCaptureStatus *captureStatus), hStream, captureStatus)
WAITS_TWICE(cuLaunchHostFunc, (CUstream hStream, CUhostFn fn, void *userData), hStream, fn, userData)
WAITS(cuMemAllocHost_v2, (void **pp, size_t bytesize), pp, bytesize)
WAITS(cuMemHostAlloc, (void **pp, size_t bytesize, unsigned int Flags), pp, bytesize, Flags)
WAITS(cuMemFreeHost, (void *p), p)
WAITS(cuMemHostRegister_v2, (void *p, size_t bytesize, unsigned int Flags), p, bytesize, Flags)

/* wait_stream.c: calls for events and streams:
 * they need nothing of libvgpu but to wait in front of the driver while the
 * lease is away (away.h, wait.h). */
#include "wait.h"

WAITS_TWICE(cuEventRecord, (CUevent hEvent, CUstream hStream), hEvent, hStream)
WAITS_TWICE(cuEventRecordWithFlags, (CUevent hEvent, CUstream hStream, unsigned int flags), hEvent, hStream, flags)
WAITS(cuEventQuery, (CUevent hEvent), hEvent)
WAITS(cuEventCreate, (CUevent * phEvent, unsigned int Flags), phEvent, Flags)
WAITS_TWICE(cuStreamQuery, (CUstream hStream), hStream)
WAITS_TWICE(cuStreamWaitEvent, (CUstream hStream, CUevent hEvent, unsigned int Flags), hStream, hEvent, Flags)
WAITS_TWICE(cuStreamIsCapturing, (CUstream hStream, CUstreamCaptureStatus *captureStatus), hStream, captureStatus)
WAITS_TWICE(cuLaunchHostFunc, (CUstream hStream, CUhostFn fn, void *userData), hStream, fn, userData)
WAITS(cuEventElapsedTime, (float *pMilliseconds, CUevent hStart, CUevent hEnd), pMilliseconds, hStart, hEnd)
WAITS(cuEventElapsedTime_v2, (float *pMilliseconds, CUevent hStart, CUevent hEnd), pMilliseconds, hStart, hEnd)
WAITS(cuEventDestroy, (CUevent hEvent), hEvent)
WAITS(cuEventDestroy_v2, (CUevent hEvent), hEvent)
WAITS(cuStreamDestroy, (CUstream hStream), hStream)
WAITS(cuStreamDestroy_v2, (CUstream hStream), hStream)
WAITS_TWICE(cuStreamAttachMemAsync, (CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags), hStream,
            dptr, length, flags)
WAITS_TWICE(cuStreamAddCallback, (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags),
            hStream, callback, userData, flags)
WAITS_TWICE(cuStreamWriteValue32, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWriteValue64, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWriteValue64_v2, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWaitValue32, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWaitValue64, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream,
            addr, value, flags)
WAITS_TWICE(cuStreamBatchMemOp,
            (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream,
            count, paramArray, flags)
WAITS_TWICE(cuStreamBatchMemOp_v2,
            (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream,
            count, paramArray, flags)
WAITS_TWICE(cuStreamCopyAttributes, (CUstream dstStream, CUstream srcStream), dstStream, srcStream)
WAITS_TWICE(cuStreamGetAttribute, (CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value), hStream, attr,
            value)
WAITS_TWICE(cuStreamSetAttribute, (CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *param), hStream,
            attr, param)
WAITS_TWICE(cuStreamGetCaptureInfo, (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out),
            hStream, captureStatus_out, id_out)
WAITS_TWICE(cuStreamGetCaptureInfo_v2,
            (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
             const CUgraphNode **dependencies_out, size_t *numDependencies_out),
            hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out)
WAITS_TWICE(cuStreamGetCaptureInfo_v3,
            (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
             const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out),
            hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out)
WAITS_TWICE(cuStreamGetFlags, (CUstream hStream, unsigned int *flags), hStream, flags)
WAITS_TWICE(cuStreamGetPriority, (CUstream hStream, int *priority), hStream, priority)

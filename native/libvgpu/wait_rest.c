/* wait_rest.c: calls of CUDA 10 to 13 that nobody has tried in a process whose memory is out.
 * They need nothing of libvgpu but to wait in front of the driver while the lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuTensorMapEncodeTiled,
      (CUtensorMap * tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
       const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const cuuint32_t *boxDim,
       const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
       CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
      tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, boxDim, elementStrides,
      interleave, swizzle, l2Promotion, oobFill)
WAITS(cuTensorMapEncodeIm2col,
      (CUtensorMap * tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
       const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const int *pixelBoxLowerCorner,
       const int *pixelBoxUpperCorner, cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
       const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
       CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
      tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, pixelBoxLowerCorner,
      pixelBoxUpperCorner, channelsPerPixel, pixelsPerColumn, elementStrides, interleave, swizzle, l2Promotion, oobFill)
WAITS(cuTensorMapReplaceAddress, (CUtensorMap * tensorMap, void *globalAddress), tensorMap, globalAddress)
WAITS(cuTensorMapEncodeIm2colWide,
      (CUtensorMap * tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
       const cuuint64_t *globalDim, const cuuint64_t *globalStrides, int pixelBoxLowerCornerWidth,
       int pixelBoxUpperCornerWidth, cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
       const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
      tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, pixelBoxLowerCornerWidth,
      pixelBoxUpperCornerWidth, channelsPerPixel, pixelsPerColumn, elementStrides, interleave, mode, swizzle,
      l2Promotion, oobFill)
WAITS(cuFuncGetName, (const char **name, CUfunction hfunc), name, hfunc)
WAITS(cuKernelGetName, (const char **name, CUkernel hfunc), name, hfunc)
WAITS(cuFuncGetParamInfo, (CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize), func,
      paramIndex, paramOffset, paramSize)
WAITS(cuKernelGetParamInfo, (CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize), kernel,
      paramIndex, paramOffset, paramSize)
WAITS(cuFuncIsLoaded, (CUfunctionLoadingState * state, CUfunction function), state, function)
WAITS(cuModuleGetFunctionCount, (unsigned int *count, CUmodule mod), count, mod)
WAITS(cuModuleEnumerateFunctions, (CUfunction * functions, unsigned int numFunctions, CUmodule mod), functions,
      numFunctions, mod)
WAITS(cuLibraryGetKernelCount, (unsigned int *count, CUlibrary lib), count, lib)
WAITS(cuLibraryEnumerateKernels, (CUkernel * kernels, unsigned int numKernels, CUlibrary lib), kernels, numKernels, lib)
WAITS(cuCtxGetDevResource, (CUcontext hCtx, CUdevResource *resource, CUdevResourceType type), hCtx, resource, type)
WAITS(cuGreenCtxRecordEvent, (CUgreenCtx hCtx, CUevent hEvent), hCtx, hEvent)
WAITS(cuGreenCtxWaitEvent, (CUgreenCtx hCtx, CUevent hEvent), hCtx, hEvent)
WAITS(cuStreamGetGreenCtx, (CUstream hStream, CUgreenCtx *phCtx), hStream, phCtx)
WAITS(cuKernelGetLibrary, (CUlibrary * pLib, CUkernel kernel), pLib, kernel)
WAITS(cuCtxRecordEvent, (CUcontext hCtx, CUevent hEvent), hCtx, hEvent)
WAITS(cuCtxWaitEvent, (CUcontext hCtx, CUevent hEvent), hCtx, hEvent)
WAITS_TWICE(cuStreamGetCtx_v2, (CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx), hStream, pCtx, pGreenCtx)
WAITS(cuCtxGetId, (CUcontext ctx, unsigned long long *ctxId), ctx, ctxId)
WAITS(cuCtxGetExecAffinity, (CUexecAffinityParam * pExecAffinity, CUexecAffinityType type), pExecAffinity, type)
WAITS(cuModuleGetLoadingMode, (CUmoduleLoadingMode * mode), mode)
WAITS(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr), flags, location, ptr)
WAITS(cuMemPoolGetAccess, (CUmemAccess_flags * flags, CUmemoryPool memPool, CUmemLocation *location), flags, memPool,
      location)
WAITS(cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *map, size_t count), pool, map, count)
WAITS(cuMemRangeGetAttributes,
      (void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes, CUdeviceptr devPtr,
       size_t count),
      data, dataSizes, attributes, numAttributes, devPtr, count)
WAITS_TWICE(cuStreamGetDevice, (CUstream hStream, CUdevice *device), hStream, device)
WAITS_TWICE(cuStreamUpdateCaptureDependencies,
            (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags), hStream,
            dependencies, numDependencies, flags)
WAITS(cuFlushGPUDirectRDMAWrites, (CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope),
      target, scope)
WAITS_TWICE(cuStreamUpdateCaptureDependencies_v2,
            (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies,
             unsigned int flags),
            hStream, dependencies, dependencyData, numDependencies, flags)
WAITS(cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned int flags), dev, flags)
WAITS_TWICE(cuSignalExternalSemaphoresAsync,
            (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray,
             unsigned int numExtSems, CUstream stream),
            extSemArray, paramsArray, numExtSems, stream)
WAITS_TWICE(cuWaitExternalSemaphoresAsync,
            (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
             unsigned int numExtSems, CUstream stream),
            extSemArray, paramsArray, numExtSems, stream)
WAITS(cuImportExternalMemory, (CUexternalMemory * extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc),
      extMem_out, memHandleDesc)
WAITS(cuDestroyExternalMemory, (CUexternalMemory extMem), extMem)
WAITS(cuImportExternalSemaphore,
      (CUexternalSemaphore * extSem_out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc), extSem_out,
      semHandleDesc)
WAITS(cuDestroyExternalSemaphore, (CUexternalSemaphore extSem), extSem)
WAITS(cuExternalMemoryGetMappedBuffer,
      (CUdeviceptr * devPtr, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc), devPtr,
      extMem, bufferDesc)
WAITS(cuExternalMemoryGetMappedMipmappedArray,
      (CUmipmappedArray * mipmap, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *mipmapDesc),
      mipmap, extMem, mipmapDesc)
WAITS_TWICE(cuMemcpy3DBatchAsync,
            (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags,
             CUstream hStream),
            numOps, opList, failIdx, flags, hStream)
WAITS_TWICE(cuMemcpy3DBatchAsync_v2,
            (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream), numOps, opList,
            flags, hStream)
WAITS_TWICE(cuMemPrefetchBatchAsync,
            (CUdeviceptr * dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
             size_t numPrefetchLocs, unsigned long long flags, CUstream hStream),
            dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream)
WAITS_TWICE(cuMemDiscardBatchAsync,
            (CUdeviceptr * dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream hStream), dptrs,
            sizes, count, flags, hStream)
WAITS_TWICE(cuMemDiscardAndPrefetchBatchAsync,
            (CUdeviceptr * dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
             size_t numPrefetchLocs, unsigned long long flags, CUstream hStream),
            dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream)
WAITS_TWICE(cuMemMapArrayAsync, (CUarrayMapInfo * mapInfoList, unsigned int count, CUstream hStream), mapInfoList,
            count, hStream)
WAITS(cuGraphExecEventRecordNodeSetEvent, (CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event), hGraphExec, hNode,
      event)
WAITS(cuGraphExecEventWaitNodeSetEvent, (CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event), hGraphExec, hNode,
      event)
WAITS(cuGraphExecChildGraphNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph), hGraphExec,
      hNode, childGraph)
WAITS(cuGraphExecBatchMemOpNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuDeviceGetTexture1DLinearMaxWidth,
      (size_t *maxWidthInElements, CUarray_format format, unsigned numChannels, CUdevice dev), maxWidthInElements,
      format, numChannels, dev)
WAITS(cuGreenCtxGetDevResource, (CUgreenCtx hCtx, CUdevResource *resource, CUdevResourceType type), hCtx, resource,
      type)
WAITS(cuDeviceGetDevResource, (CUdevice device, CUdevResource *resource, CUdevResourceType type), device, resource,
      type)
WAITS(cuDevResourceGenerateDesc, (CUdevResourceDesc * phDesc, CUdevResource *resources, unsigned int nbResources),
      phDesc, resources, nbResources)
WAITS(cuDevSmResourceSplitByCount,
      (CUdevResource * result, unsigned int *nbGroups, const CUdevResource *input, CUdevResource *remainder,
       unsigned int flags, unsigned int minCount),
      result, nbGroups, input, remainder, flags, minCount)
WAITS(cuGreenCtxGetId, (CUgreenCtx greenCtx, unsigned long long *greenCtxId), greenCtx, greenCtxId)

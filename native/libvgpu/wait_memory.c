/* wait_memory.c: calls for memory that is there already:
 * they need nothing of libvgpu but to wait in front of the driver while the
 * lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuMemAllocHost_v2, (void **pp, size_t bytesize), pp, bytesize)
WAITS(cuMemHostAlloc, (void **pp, size_t bytesize, unsigned int Flags), pp, bytesize, Flags)
WAITS(cuMemFreeHost, (void *p), p)
WAITS(cuMemHostRegister_v2, (void *p, size_t bytesize, unsigned int Flags), p, bytesize, Flags)
WAITS(cuMemHostUnregister, (void *p), p)
WAITS(cuMemSetAccess, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count), ptr, size, desc, count)
WAITS(cuMemAddressFree, (CUdeviceptr ptr, size_t size), ptr, size)
WAITS(cuMemAdvise, (CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device), devPtr, count, advice,
      device)
WAITS(cuMemAdvise_v2, (CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location), devPtr, count,
      advice, location)
WAITS_TWICE(cuMemPrefetchAsync, (CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream), devPtr, count,
            dstDevice, hStream)
WAITS_TWICE(cuMemPrefetchAsync_v2,
            (CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream), devPtr,
            count, location, flags, hStream)
WAITS(cuMemRangeGetAttribute,
      (void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr, size_t count), data, dataSize,
      attribute, devPtr, count)
WAITS(cuIpcGetMemHandle, (CUipcMemHandle * pHandle, CUdeviceptr dptr), pHandle, dptr)
WAITS(cuIpcOpenMemHandle, (CUdeviceptr * pdptr, CUipcMemHandle handle, unsigned int Flags), pdptr, handle, Flags)
WAITS(cuIpcOpenMemHandle_v2, (CUdeviceptr * pdptr, CUipcMemHandle handle, unsigned int Flags), pdptr, handle, Flags)
WAITS(cuIpcCloseMemHandle, (CUdeviceptr dptr), dptr)
WAITS(cuIpcGetEventHandle, (CUipcEventHandle * pHandle, CUevent event), pHandle, event)
WAITS(cuIpcOpenEventHandle, (CUevent * phEvent, CUipcEventHandle handle), phEvent, handle)
WAITS(cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr ptr), value, attribute, ptr)
WAITS(cuTexObjectCreate,
      (CUtexObject * pTexObject, const CUDA_RESOURCE_DESC *pResDesc, const CUDA_TEXTURE_DESC *pTexDesc,
       const CUDA_RESOURCE_VIEW_DESC *pResViewDesc),
      pTexObject, pResDesc, pTexDesc, pResViewDesc)
WAITS(cuTexObjectDestroy, (CUtexObject texObject), texObject)
WAITS(cuSurfObjectCreate, (CUsurfObject * pSurfObject, const CUDA_RESOURCE_DESC *pResDesc), pSurfObject, pResDesc)
WAITS(cuSurfObjectDestroy, (CUsurfObject surfObject), surfObject)
WAITS(cuMemAddressReserve,
      (CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags), ptr, size,
      alignment, addr, flags)
WAITS_TWICE(cuMemBatchDecompressAsync,
            (CUmemDecompressParams * paramsArray, size_t count, unsigned int flags, size_t *errorIndex,
             CUstream stream),
            paramsArray, count, flags, errorIndex, stream)
WAITS(cuMemGetAllocationGranularity,
      (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option), granularity,
      prop, option)
WAITS(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp * prop, CUmemGenericAllocationHandle handle), prop,
      handle)
WAITS(cuMemHostGetDevicePointer_v2, (CUdeviceptr * pdptr, void *p, unsigned int Flags), pdptr, p, Flags)
WAITS(cuMemHostGetFlags, (unsigned int *pFlags, void *p), pFlags, p)
WAITS(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value), pool, attr, value)
WAITS(cuPointerGetAttributes,
      (unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr), numAttributes,
      attributes, data, ptr)

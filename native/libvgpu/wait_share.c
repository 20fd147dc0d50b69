/* wait_share.c: calls for memory that several processes or devices share: they need nothing of libvgpu but to wait in
 * front of the driver while the lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuMemExportToShareableHandle,
      (void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
       unsigned long long flags),
      shareableHandle, handle, handleType, flags)
WAITS(cuMemGetHandleForAddressRange,
      (void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags), handle,
      dptr, size, handleType, flags)
WAITS(cuMemImportFromShareableHandle,
      (CUmemGenericAllocationHandle * handle, void *osHandle, CUmemAllocationHandleType shHandleType), handle, osHandle,
      shHandleType)
WAITS(cuMemPoolExportPointer, (CUmemPoolPtrExportData * shareData_out, CUdeviceptr ptr), shareData_out, ptr)
WAITS(cuMemPoolExportToShareableHandle,
      (void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags), handle_out,
      pool, handleType, flags)
WAITS(cuMemPoolImportFromShareableHandle,
      (CUmemoryPool * pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags), pool_out,
      handle, handleType, flags)
WAITS(cuMemPoolImportPointer, (CUdeviceptr * ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData), ptr_out,
      pool, shareData)
WAITS(cuMulticastAddDevice, (CUmemGenericAllocationHandle mcHandle, CUdevice dev), mcHandle, dev)
WAITS(cuMulticastBindAddr,
      (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
       unsigned long long flags),
      mcHandle, mcOffset, memptr, size, flags)
WAITS(cuMulticastBindMem,
      (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle, size_t memOffset,
       size_t size, unsigned long long flags),
      mcHandle, mcOffset, memHandle, memOffset, size, flags)
WAITS(cuMulticastCreate, (CUmemGenericAllocationHandle * mcHandle, const CUmulticastObjectProp *prop), mcHandle, prop)
WAITS(cuMulticastGetGranularity,
      (size_t *granularity, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option), granularity, prop,
      option)
WAITS(cuMulticastUnbind, (CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size), mcHandle,
      dev, mcOffset, size)

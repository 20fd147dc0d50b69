/* wait_legacy.c: the oldest forms of calls, of CUDA 2 to 4, that a driver still has: they need nothing of libvgpu but to
 * wait in front of the driver while the lease is away (away.h, wait.h). Those with addresses take 32 bits. */
#include "wait.h"

WAITS(cuCtxAttach, (CUcontext * pctx, unsigned int flags), pctx, flags)
WAITS(cuCtxPopCurrent, (CUcontext * pctx), pctx)
WAITS(cuCtxPushCurrent, (CUcontext ctx), ctx)
WAITS(cuDeviceComputeCapability, (int *major, int *minor, CUdevice dev), major, minor, dev)
WAITS(cuDeviceGetProperties, (CUdevprop * prop, CUdevice dev), prop, dev)
WAITS(cuDevicePrimaryCtxSetFlags, (CUdevice dev, unsigned int flags), dev, flags)
WAITS(cuFuncSetBlockShape, (CUfunction hfunc, int x, int y, int z), hfunc, x, y, z)
WAITS(cuFuncSetSharedSize, (CUfunction hfunc, unsigned int bytes), hfunc, bytes)
WAITS(cuMemAllocHost, (void **pp, unsigned int bytesize), pp, bytesize)
WAITS(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *pCopy), pCopy)
WAITS(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *pCopy, CUstream hStream), pCopy, hStream)
WAITS(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *pCopy), pCopy)
WAITS(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *pCopy), pCopy)
WAITS(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *pCopy, CUstream hStream), pCopy, hStream)
WAITS(cuMemcpyAtoA,
      (CUarray dstArray, unsigned int dstOffset, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount),
      dstArray, dstOffset, srcArray, srcOffset, ByteCount)
WAITS(cuMemcpyAtoD, (CUdeviceptr_v1 dstDevice, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount),
      dstDevice, srcArray, srcOffset, ByteCount)
WAITS(cuMemcpyAtoH, (void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount), dstHost,
      srcArray, srcOffset, ByteCount)
WAITS(cuMemcpyAtoHAsync,
      (void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount, CUstream hStream), dstHost,
      srcArray, srcOffset, ByteCount, hStream)
WAITS(cuMemcpyDtoA, (CUarray dstArray, unsigned int dstOffset, CUdeviceptr_v1 srcDevice, unsigned int ByteCount),
      dstArray, dstOffset, srcDevice, ByteCount)
WAITS(cuMemcpyDtoD, (CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount), dstDevice, srcDevice,
      ByteCount)
WAITS(cuMemcpyDtoDAsync, (CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount, CUstream hStream),
      dstDevice, srcDevice, ByteCount, hStream)
WAITS(cuMemcpyDtoH, (void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount), dstHost, srcDevice, ByteCount)
WAITS(cuMemcpyDtoHAsync, (void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount, CUstream hStream), dstHost,
      srcDevice, ByteCount, hStream)
WAITS(cuMemcpyHtoA, (CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount), dstArray,
      dstOffset, srcHost, ByteCount)
WAITS(cuMemcpyHtoAAsync,
      (CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount, CUstream hStream),
      dstArray, dstOffset, srcHost, ByteCount, hStream)
WAITS(cuMemcpyHtoD, (CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount), dstDevice, srcHost,
      ByteCount)
WAITS(cuMemcpyHtoDAsync, (CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount, CUstream hStream),
      dstDevice, srcHost, ByteCount, hStream)
WAITS(cuMemGetAddressRange, (CUdeviceptr_v1 * pbase, unsigned int *psize, CUdeviceptr_v1 dptr), pbase, psize, dptr)
WAITS(cuMemHostGetDevicePointer, (CUdeviceptr_v1 * pdptr, void *p, unsigned int Flags), pdptr, p, Flags)
WAITS(cuMemHostRegister, (void *p, size_t bytesize, unsigned int Flags), p, bytesize, Flags)
WAITS(cuMemsetD16, (CUdeviceptr_v1 dstDevice, unsigned short us, unsigned int N), dstDevice, us, N)
WAITS(cuMemsetD2D16,
      (CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned short us, unsigned int Width, unsigned int Height),
      dstDevice, dstPitch, us, Width, Height)
WAITS(cuMemsetD2D32,
      (CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned int ui, unsigned int Width, unsigned int Height),
      dstDevice, dstPitch, ui, Width, Height)
WAITS(cuMemsetD2D8,
      (CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned char uc, unsigned int Width, unsigned int Height),
      dstDevice, dstPitch, uc, Width, Height)
WAITS(cuMemsetD32, (CUdeviceptr_v1 dstDevice, unsigned int ui, unsigned int N), dstDevice, ui, N)
WAITS(cuMemsetD8, (CUdeviceptr_v1 dstDevice, unsigned char uc, unsigned int N), dstDevice, uc, N)
WAITS(cuModuleGetGlobal, (CUdeviceptr_v1 * dptr, unsigned int *bytes, CUmodule hmod, const char *name), dptr, bytes,
      hmod, name)
WAITS(cuParamSetf, (CUfunction hfunc, int offset, float value), hfunc, offset, value)
WAITS(cuParamSeti, (CUfunction hfunc, int offset, unsigned int value), hfunc, offset, value)
WAITS(cuParamSetSize, (CUfunction hfunc, unsigned int numbytes), hfunc, numbytes)
WAITS(cuParamSetTexRef, (CUfunction hfunc, int texunit, CUtexref hTexRef), hfunc, texunit, hTexRef)
WAITS(cuParamSetv, (CUfunction hfunc, int offset, void *ptr, unsigned int numbytes), hfunc, offset, ptr, numbytes)

/*
 * copy.c: copies and memsets. If they are at least COPY_LEAST_BYTES large, they pass the gate, with the weight of one
 * launch for each MiB, because they use the device's memory bandwidth and copy engines.
 */
#include <stddef.h>
#include <stdint.h>

#include "suspended.h"
#include "functions.h"
#include "gate.h"
#include "swap.h"

#define COPY_LEAST_BYTES (1u << 20)

#define COPY_BODY(symbol, bytes, stream, per_thread, ...)                                    \
    do {                                                                                     \
        uint64_t bytes_ = (bytes);                                                           \
        struct vgpu_inside *inside_ __attribute__((cleanup(vgpu_inside_leave), unused)) =    \
            bytes_ < COPY_LEAST_BYTES ? vgpu_suspended_called() : vgpu_suspended_launched(); \
        if (bytes_ < COPY_LEAST_BYTES || vgpu_gate_passes(bytes_ / COPY_LEAST_BYTES))        \
            return CALL_INSIDE(symbol, __VA_ARGS__);                                         \
        CUresult result = vgpu_gate_look(stream, per_thread, bytes_ / COPY_LEAST_BYTES);     \
        if (result != CUDA_SUCCESS)                                                          \
            return result;                                                                   \
        result = CALL_INSIDE(symbol, __VA_ARGS__);                                           \
        vgpu_gate_launched(bytes_ / COPY_LEAST_BYTES);                                       \
        return result;                                                                       \
    } while (0)

/* Defines a function on `stream`, and its twin for the per-thread default stream, whose name ends in `suffix`. */
#define TWINS(symbol, suffix, stream, bytes, parameters, ...)     \
    VGPU_EXPORT CUresult symbol parameters                        \
    {                                                             \
        COPY_BODY(symbol, bytes, stream, 0, __VA_ARGS__);         \
    }                                                             \
    VGPU_EXPORT CUresult symbol##suffix parameters                \
    {                                                             \
        COPY_BODY(symbol##suffix, bytes, stream, 1, __VA_ARGS__); \
    }
#define SYNC(symbol, bytes, parameters, ...) TWINS(symbol, _ptds, NULL, bytes, parameters, __VA_ARGS__)
#define ASYNC(symbol, bytes, parameters, ...) TWINS(symbol, _ptsz, hStream, bytes, parameters, __VA_ARGS__)

SYNC(cuMemcpy, ByteCount, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), dst, src, ByteCount)
ASYNC(cuMemcpyAsync, ByteCount, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), dst, src,
      ByteCount, hStream)
SYNC(cuMemcpyPeer, ByteCount,
     (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount),
     dstDevice, dstContext, srcDevice, srcContext, ByteCount)
ASYNC(cuMemcpyPeerAsync, ByteCount,
      (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount,
       CUstream hStream),
      dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream)
SYNC(cuMemcpyHtoD_v2, ByteCount, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount), dstDevice, srcHost,
     ByteCount)
SYNC(cuMemcpyDtoH_v2, ByteCount, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount), dstHost, srcDevice,
     ByteCount)
SYNC(cuMemcpyDtoD_v2, ByteCount, (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount), dstDevice, srcDevice,
     ByteCount)
ASYNC(cuMemcpyHtoDAsync_v2, ByteCount, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),
      dstDevice, srcHost, ByteCount, hStream)
ASYNC(cuMemcpyDtoHAsync_v2, ByteCount, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
      dstHost, srcDevice, ByteCount, hStream)
ASYNC(cuMemcpyDtoDAsync_v2, ByteCount,
      (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream), dstDevice, srcDevice,
      ByteCount, hStream)
SYNC(cuMemcpyHtoA_v2, ByteCount, (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount), dstArray,
     dstOffset, srcHost, ByteCount)
SYNC(cuMemcpyAtoH_v2, ByteCount, (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount), dstHost,
     srcArray, srcOffset, ByteCount)
SYNC(cuMemcpyDtoA_v2, ByteCount, (CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount),
     dstArray, dstOffset, srcDevice, ByteCount)
SYNC(cuMemcpyAtoD_v2, ByteCount, (CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount),
     dstDevice, srcArray, srcOffset, ByteCount)
SYNC(cuMemcpyAtoA_v2, ByteCount,
     (CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount), dstArray, dstOffset,
     srcArray, srcOffset, ByteCount)
ASYNC(cuMemcpyHtoAAsync_v2, ByteCount,
      (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream), dstArray,
      dstOffset, srcHost, ByteCount, hStream)
ASYNC(cuMemcpyAtoHAsync_v2, ByteCount,
      (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream), dstHost, srcArray,
      srcOffset, ByteCount, hStream)
SYNC(cuMemcpy2D_v2, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height, (const CUDA_MEMCPY2D *pCopy), pCopy)
SYNC(cuMemcpy2DUnaligned_v2, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height, (const CUDA_MEMCPY2D *pCopy),
     pCopy)
ASYNC(cuMemcpy2DAsync_v2, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height,
      (const CUDA_MEMCPY2D *pCopy, CUstream hStream), pCopy, hStream)
SYNC(cuMemcpy3D_v2, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height * pCopy->Depth,
     (const CUDA_MEMCPY3D *pCopy), pCopy)
ASYNC(cuMemcpy3DAsync_v2, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height * pCopy->Depth,
      (const CUDA_MEMCPY3D *pCopy, CUstream hStream), pCopy, hStream)
SYNC(cuMemcpy3DPeer, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height * pCopy->Depth,
     (const CUDA_MEMCPY3D_PEER *pCopy), pCopy)
ASYNC(cuMemcpy3DPeerAsync, pCopy == NULL ? 0 : pCopy->WidthInBytes * pCopy->Height * pCopy->Depth,
      (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream), pCopy, hStream)
SYNC(cuMemsetD8_v2, N, (CUdeviceptr dstDevice, unsigned char uc, size_t N), dstDevice, uc, N)
SYNC(cuMemsetD16_v2, N * 2, (CUdeviceptr dstDevice, unsigned short us, size_t N), dstDevice, us, N)
SYNC(cuMemsetD32_v2, N * 4, (CUdeviceptr dstDevice, unsigned int ui, size_t N), dstDevice, ui, N)
SYNC(cuMemsetD2D8_v2, Width *Height,
     (CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height), dstDevice, dstPitch, uc,
     Width, Height)
SYNC(cuMemsetD2D16_v2, Width * Height * 2,
     (CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height), dstDevice, dstPitch, us,
     Width, Height)
SYNC(cuMemsetD2D32_v2, Width * Height * 4,
     (CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height), dstDevice, dstPitch, ui,
     Width, Height)
ASYNC(cuMemsetD8Async, N, (CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream), dstDevice, uc, N,
      hStream)
ASYNC(cuMemsetD16Async, N * 2, (CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream), dstDevice, us, N,
      hStream)
ASYNC(cuMemsetD32Async, N * 4, (CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream), dstDevice, ui, N,
      hStream)
ASYNC(cuMemsetD2D8Async, Width *Height,
      (CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream),
      dstDevice, dstPitch, uc, Width, Height, hStream)
ASYNC(cuMemsetD2D16Async, Width * Height * 2,
      (CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, CUstream hStream),
      dstDevice, dstPitch, us, Width, Height, hStream)
ASYNC(cuMemsetD2D32Async, Width * Height * 4,
      (CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream),
      dstDevice, dstPitch, ui, Width, Height, hStream)

static uint64_t sum_of(const size_t *sizes, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; sizes != NULL && i < count; i++)
        sum += sizes[i];
    return sum;
}

ASYNC(cuMemcpyBatchAsync, sum_of(sizes, count),
      (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
       size_t numAttrs, size_t *failIdx, CUstream hStream),
      dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream)
ASYNC(cuMemcpyBatchAsync_v2, sum_of(sizes, count),
      (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
       size_t numAttrs, CUstream hStream),
      dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream)

#define ELEMENT_BYTES_MAX 16u /* largest element of an array: four channels of 32 bits */

/*
 * Sums the bytes of copies in three dimensions. An extent counts elements, whose size only the array knows. The largest
 * size is assumed, so that no such copy bypasses the gate. Between two pointers an element is a byte.
 */
static uint64_t sum_of_3d(const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; copies != NULL && i < count; i++) {
        const CUDA_MEMCPY3D_BATCH_OP *one = &copies[i];
        bool bytes = one->src.type == CU_MEMCPY_OPERAND_TYPE_POINTER && one->dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER;
        sum += one->extent.width * one->extent.height * one->extent.depth * (bytes ? 1u : ELEMENT_BYTES_MAX);
    }
    return sum;
}

static uint64_t sum_of_fabric(const CUDA_FABRIC_COPY_BATCH_OP *copies, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; copies != NULL && i < count; i++)
        sum += copies[i].size;
    return sum;
}

ASYNC(cuMemcpyWithAttributesAsync, size,
      (CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, CUstream hStream), dst, src, size, attr,
      hStream)
ASYNC(cuMemcpy3DWithAttributesAsync, sum_of_3d(op, 1),
      (CUDA_MEMCPY3D_BATCH_OP * op, unsigned long long flags, CUstream hStream), op, flags, hStream)
ASYNC(cuMemcpy3DBatchAsync, sum_of_3d(opList, numOps),
      (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags, CUstream hStream),
      numOps, opList, failIdx, flags, hStream)
ASYNC(cuMemcpy3DBatchAsync_v2, sum_of_3d(opList, numOps),
      (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream), numOps, opList,
      flags, hStream)
ASYNC(cuFabricCpyBatchAsync, sum_of_fabric(opList, numOps),
      (size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags, CUstream hStream), numOps, opList,
      flags, hStream)

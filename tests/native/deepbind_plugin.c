/* A plugin of deepbind.c, linked to libcuda. */
#include <cuda.h>

int hold(size_t bytes)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr pointer;
    CUresult result = cuInit(0);
    if (result == CUDA_SUCCESS)
        result = cuDeviceGet(&device, 0);
    if (result == CUDA_SUCCESS)
        result = cuDevicePrimaryCtxRetain(&context, device);
    if (result == CUDA_SUCCESS)
        result = cuCtxSetCurrent(context);
    return (int)(result == CUDA_SUCCESS ? cuMemAlloc(&pointer, bytes) : result);
}

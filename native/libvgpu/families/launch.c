/*
 * launch.c: launches of kernels and graphs. Each launch passes the gate; a launch that is captured into a graph waits
 * only while the lease is suspended.
 */
#include "suspended.h"
#include "functions.h"
#include "gate.h"
#include "graph_memory.h"
#include "in_flight.h"
#include "swap.h"
#include "tenant.h"

#define KERNEL_WEIGHT 1u
/* weight of a graph, so that it is checked at nearly each launch: it may contain one kernel or thousands */
#define GRAPH_WEIGHT 16u

#define LAUNCH_BODY(weight, stream, per_thread, symbol, ...)          \
    do {                                                              \
        vgpu_suspended_launch();                                      \
        if (vgpu_gate_passes(weight))                                 \
            return CALL_INSIDE(symbol, __VA_ARGS__);                  \
        CUresult result = vgpu_gate_look(stream, per_thread, weight); \
        if (result != CUDA_SUCCESS)                                   \
            return result;                                            \
        result = CALL_INSIDE(symbol, __VA_ARGS__);                    \
        vgpu_gate_launched(weight);                                   \
        return result;                                                \
    } while (0)

#define LAUNCH_KERNEL(symbol, per_thread)                                                                              \
    VGPU_EXPORT CUresult symbol(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,     \
                                unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,                \
                                unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)      \
    {                                                                                                                  \
        LAUNCH_BODY(KERNEL_WEIGHT, hStream, per_thread, symbol, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, \
                    blockDimZ, sharedMemBytes, hStream, kernelParams, extra);                                          \
    }
LAUNCH_KERNEL(cuLaunchKernel, 0)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, 1)

#define LAUNCH_KERNEL_EX(symbol, per_thread)                                                                   \
    VGPU_EXPORT CUresult symbol(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) \
    {                                                                                                          \
        CUstream stream = config != NULL ? config->hStream : NULL;                                             \
        LAUNCH_BODY(KERNEL_WEIGHT, stream, per_thread, symbol, config, f, kernelParams, extra);                \
    }
LAUNCH_KERNEL_EX(cuLaunchKernelEx, 0)
LAUNCH_KERNEL_EX(cuLaunchKernelEx_ptsz, 1)

#define LAUNCH_COOPERATIVE(symbol, per_thread)                                                                         \
    VGPU_EXPORT CUresult symbol(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,     \
                                unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,                \
                                unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)                    \
    {                                                                                                                  \
        LAUNCH_BODY(KERNEL_WEIGHT, hStream, per_thread, symbol, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, \
                    blockDimZ, sharedMemBytes, hStream, kernelParams);                                                 \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, 0)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, 1)

/* Records all devices of a launch on several devices, because its slice must include all of them. */
static CUresult touch_all(const CUDA_LAUNCH_PARAMS *list, unsigned int count)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    if (list == NULL || result != CUDA_SUCCESS || !limited)
        return result;
    for (unsigned int i = 0; i < count; i++)
        if (vgpu_in_flight_touch(list[i].hStream, 0) == VGPU_TOUCH_NO_MEMORY)
            return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

VGPU_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices,
                                                          unsigned int flags)
{
    vgpu_suspended_call();
    CUstream stream = launchParamsList != NULL && numDevices > 0 ? launchParamsList[0].hStream : NULL;
    CUresult noted = touch_all(launchParamsList, numDevices);
    if (noted != CUDA_SUCCESS)
        return noted;
    LAUNCH_BODY(KERNEL_WEIGHT, stream, 0, cuLaunchCooperativeKernelMultiDevice, launchParamsList, numDevices, flags);
}

VGPU_EXPORT CUresult cuLaunch(CUfunction f)
{
    LAUNCH_BODY(KERNEL_WEIGHT, NULL, 0, cuLaunch, f);
}

VGPU_EXPORT CUresult cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
{
    LAUNCH_BODY(KERNEL_WEIGHT, NULL, 0, cuLaunchGrid, f, grid_width, grid_height);
}

VGPU_EXPORT CUresult cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
{
    LAUNCH_BODY(KERNEL_WEIGHT, hStream, 0, cuLaunchGridAsync, f, grid_width, grid_height, hStream);
}

/* Before a graph's launch, the memory that it allocates when it runs is claimed: see graph_memory.h. */
#define LAUNCH_GRAPH(symbol, per_thread)                                              \
    static CUresult gated_##symbol(CUgraphExec hGraphExec, CUstream hStream)          \
    {                                                                                 \
        LAUNCH_BODY(GRAPH_WEIGHT, hStream, per_thread, symbol, hGraphExec, hStream);  \
    }                                                                                 \
    VGPU_EXPORT CUresult symbol(CUgraphExec hGraphExec, CUstream hStream)             \
    {                                                                                 \
        struct vgpu_graph_charge charge;                                              \
        CUresult result = vgpu_graph_begin(&charge, hGraphExec, hStream, per_thread); \
        if (result != CUDA_SUCCESS)                                                   \
            return result;                                                            \
        return vgpu_graph_end(&charge, gated_##symbol(hGraphExec, hStream));          \
    }
LAUNCH_GRAPH(cuGraphLaunch, 0)
LAUNCH_GRAPH(cuGraphLaunch_ptsz, 1)

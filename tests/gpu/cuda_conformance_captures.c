/*
 * cuda_conformance_captures.c: which calls break a capture that the same thread began on another stream in thread-local
 * mode. libvgpu makes these calls itself inside a program's call.
 */
#include "cuda_conformance.h"

static CUstream other, side;
static CUevent ran;
static CUdeviceptr held, fresh, space;
static CUmemoryPool pool, made;
static CUmemGenericAllocationHandle handle;
static CUarray array;
static CUcontext context;
static char page[8192] __attribute__((aligned(4096)));
static const CUmemAllocationProp PHYSICAL = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                             .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static const CUmemPoolProps IN_POOL = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

#define ACT(name, ...)               \
    static CUresult act_##name(void) \
    {                                \
        return CALL(__VA_ARGS__);    \
    }
static cuuint64_t value;
static size_t size, total;
static float ms;
static void *host;
static unsigned flags;
static int number;

ACT(pool_attribute, cuMemPoolGetAttribute, (CUmemoryPool, int, void *), pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    &value)
ACT(pool_set, cuMemPoolSetAttribute, (CUmemoryPool, int, void *), made, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value)
ACT(pool_trim, cuMemPoolTrimTo, (CUmemoryPool, size_t), pool, 0)
ACT(pool_of_device, cuDeviceGetMemPool, (CUmemoryPool *, CUdevice), &pool, 0)
ACT(pool_create, cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &made, &IN_POOL)
ACT(pool_destroy, cuMemPoolDestroy, (CUmemoryPool), made)
ACT(alloc_async, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream), &fresh, 4096, other)
ACT(free_async, cuMemFreeAsync, (CUdeviceptr, CUstream), fresh, other)
ACT(memory_info, cuMemGetInfo_v2, (size_t *, size_t *), &size, &total)
ACT(address_range, cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr), &space, &size, held)
ACT(memory_type, cuPointerGetAttribute, (void *, int, CUdeviceptr), &number, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, held)
ACT(event_create, cuEventCreate, (CUevent *, unsigned), &ran, 0)
ACT(event_record, cuEventRecord, (CUevent, CUstream), ran, other)
ACT(event_query, cuEventQuery, (CUevent), ran)
ACT(event_wait, cuEventSynchronize, (CUevent), ran)
ACT(event_elapsed, cuEventElapsedTime_v2, (float *, CUevent, CUevent), &ms, ran, ran)
ACT(event_destroy, cuEventDestroy_v2, (CUevent), ran)
ACT(stream_create, cuStreamCreate, (CUstream *, unsigned), &side, 1)
ACT(stream_context, cuStreamGetCtx, (CUstream, CUcontext *), other, &context)
ACT(stream_query, cuStreamQuery, (CUstream), other)
ACT(stream_wait, cuStreamSynchronize, (CUstream), other)
ACT(stream_destroy, cuStreamDestroy_v2, (CUstream), side)
ACT(limit, cuCtxGetLimit, (size_t *, int), &size, CU_LIMIT_STACK_SIZE)
ACT(set_limit, cuCtxSetLimit, (int, size_t), CU_LIMIT_STACK_SIZE, 4096)
ACT(device, cuCtxGetDevice, (CUdevice *), &number)
ACT(primary, cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *), 0, &flags, &number)
ACT(physical, cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long),
    &handle, 2 * MIB, &PHYSICAL, 0)
ACT(reserve, cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &space, 2 * MIB, 0,
    0, 0)
ACT(map, cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), space, 2 * MIB, 0,
    handle, 0)
static CUresult act_access(void)
{
    CUmemAccessDesc access = {.location = PHYSICAL.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return CALL(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t), space, 2 * MIB, &access, 1);
}
ACT(unmap, cuMemUnmap, (CUdeviceptr, size_t), space, 2 * MIB)
ACT(unphysical, cuMemRelease, (CUmemGenericAllocationHandle), handle)
ACT(unreserve, cuMemAddressFree, (CUdeviceptr, size_t), space, 2 * MIB)
ACT(granularity, cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int), &size, &PHYSICAL, 0)
ACT(host_alloc, cuMemHostAlloc, (void **, size_t, unsigned), &host, 4096, 0)
ACT(host_free, cuMemFreeHost, (void *), host)
ACT(host_register, cuMemHostRegister_v2, (void *, size_t, unsigned), page, sizeof(page), 0)
ACT(host_unregister, cuMemHostUnregister, (void *), page)
ACT(copy, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t), held, page, 64)
ACT(copy_async, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream), held, page, 64, other)
static CUresult act_array(void)
{
    CUDA_ARRAY_DESCRIPTOR shape = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    return CALL(cuArrayCreate_v2, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *), &array, &shape);
}
ACT(array_destroy, cuArrayDestroy, (CUarray), array)
ACT(graph_memory, cuDeviceGetGraphMemAttribute, (CUdevice, int, void *), 0, 0, &value)
ACT(graph_trim, cuDeviceGraphMemTrim, (CUdevice), 0)
static CUresult act_alloc(void)
{
    return alloc(&fresh, 4096);
}
static CUresult act_free(void)
{
    return drop(fresh);
}

static const struct {
    const char *name;
    CUresult (*act)(void);
} ACTS[] = {{"pool of the device", act_pool_of_device},
            {"pool attribute", act_pool_attribute},
            {"pool create", act_pool_create},
            {"pool set attribute", act_pool_set},
            {"pool destroy", act_pool_destroy},
            {"pool trim", act_pool_trim},
            {"alloc async", act_alloc_async},
            {"free async", act_free_async},
            {"memory info", act_memory_info},
            {"address range", act_address_range},
            {"pointer attribute", act_memory_type},
            {"event create", act_event_create},
            {"event record", act_event_record},
            {"event query", act_event_query},
            {"event wait", act_event_wait},
            {"event elapsed", act_event_elapsed},
            {"event destroy", act_event_destroy},
            {"stream create", act_stream_create},
            {"stream context", act_stream_context},
            {"stream query", act_stream_query},
            {"stream wait", act_stream_wait},
            {"stream destroy", act_stream_destroy},
            {"limit", act_limit},
            {"set limit", act_set_limit},
            {"device", act_device},
            {"primary state", act_primary},
            {"physical", act_physical},
            {"reserve", act_reserve},
            {"map", act_map},
            {"access", act_access},
            {"unmap", act_unmap},
            {"release", act_unphysical},
            {"unreserve", act_unreserve},
            {"granularity", act_granularity},
            {"host alloc", act_host_alloc},
            {"host free", act_host_free},
            {"host register", act_host_register},
            {"host unregister", act_host_unregister},
            {"copy", act_copy},
            {"copy async", act_copy_async},
            {"array create", act_array},
            {"array destroy", act_array_destroy},
            {"graph memory", act_graph_memory},
            {"graph trim", act_graph_trim},
            {"alloc", act_alloc},
            {"free", act_free}};

/*
 * Prints, for each call, its own result times 1000 plus the result of ending the capture. A call that the capture
 * refuses is made again after the capture, because later calls use the objects that it makes.
 */
void captures(CUcontext ctx)
{
    CUstream captured;
    context = ctx;
    CALL(cuStreamCreate, (CUstream *, unsigned), &captured, CU_STREAM_NON_BLOCKING);
    CALL(cuStreamCreate, (CUstream *, unsigned), &other, CU_STREAM_NON_BLOCKING);
    alloc(&held, 4096);
    for (size_t i = 0; i < sizeof(ACTS) / sizeof(ACTS[0]); i++) {
        char text[96];
        CUgraph graph = NULL;
        CALL(cuStreamBeginCapture_v2, (CUstream, int), captured, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        CUresult result = ACTS[i].act();
        CUresult ended = CALL(cuStreamEndCapture, (CUstream, CUgraph *), captured, &graph);
        if (graph != NULL)
            CALL(cuGraphDestroy, (CUgraph), graph);
        if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            ACTS[i].act();
        snprintf(text, sizeof(text), "beside a capture: %s", ACTS[i].name);
        say(text, result * 1000 + ended);
    }
    drop(held);
    CALL(cuStreamDestroy_v2, (CUstream), captured);
    CALL(cuStreamDestroy_v2, (CUstream), other);
}

/* api_test.c: uses libvgpu as a CUDA program does, against the fake driver. Runs with libvgpu preloaded and a lease of
 * LIMIT bytes on device 0. The argument names one check; exit status 0 means that it passed.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#define MIB (1ull << 20)
#define LIMIT (1024 * MIB)
#define CONTEXT (64 * MIB) /* bytes of a context in the fake driver */

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

void *next_of(const char *name);

static CUcontext context;

static void begin(void)
{
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    CHECK(cuCtxSetCurrent(context) == CUDA_SUCCESS);
}

static uint64_t free_bytes(void)
{
    size_t available = 0;
    size_t total = 0;
    CHECK(cuMemGetInfo_v2(&available, &total) == CUDA_SUCCESS && total == LIMIT);
    return available;
}

/* Waits until this much memory is free. libvgpu may learn late how much the driver reserves, because NVML starts
 * slowly. */
static bool becomes_free(uint64_t bytes)
{
    for (int look = 0; look < 2000 && free_bytes() != bytes; look++)
        usleep(1000);
    return free_bytes() == bytes;
}

static const char *object_of(const void *address)
{
    Dl_info about;
    CHECK(address != NULL && dladdr(address, &about) != 0);
    const char *slash = strrchr(about.dli_fname, '/');
    return slash != NULL ? slash + 1 : about.dli_fname;
}

static bool ours(const void *address)
{
    return strcmp(object_of(address), "libvgpu.so") == 0;
}

static void check_ways_in(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    void *namesake = dlopen("libnamesake.so", RTLD_NOW | RTLD_LOCAL);
    begin();
    CHECK(ours((void *)cuMemAlloc_v2));
    CHECK(ours(dlsym(cuda, "cuMemAlloc_v2")));
    CHECK(ours(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2")));
    CHECK(ours(dlsym(RTLD_NEXT, "cuMemAlloc_v2")));
    CHECK(ours(next_of("cuMemAlloc_v2")));
    CHECK(strcmp(object_of(dlsym(cuda, "cuDeviceGetCount")), "libcuda.so.1") == 0);
    CHECK(namesake != NULL && strcmp(object_of(dlsym(namesake, "cuMemAlloc_v2")), "libnamesake.so") == 0);
    CHECK(next_of("malloc") != NULL && !ours(next_of("malloc")));
    /* RTLD_NEXT still means the next library after the caller's */
    CHECK(next_of("next_of") == NULL && dlerror() != NULL);
    /* the fake driver lacks the function, so a look-up must fail */
    CHECK(dlsym(cuda, "cuCtxCreate_v4") == NULL && dlerror() != NULL);
    CHECK(dlsym(RTLD_DEFAULT, "cuCtxCreate_v4") == NULL);
    CHECK(dlvsym(RTLD_DEFAULT, "dlopen", "GLIBC_2.2.5") != NULL ||
          dlvsym(RTLD_DEFAULT, "dlopen", "GLIBC_2.17") != NULL);
    CHECK(dlvsym(RTLD_DEFAULT, "dlopen", "NONE_1.0") == NULL);
}

static void check_proc_address(void)
{
    CUdriverProcAddressQueryResult status = 99;
    void *address = NULL;
    begin();
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &address, 12000, 0, &status) == CUDA_SUCCESS);
    CHECK(address == (void *)cuMemAlloc_v2 && status == CU_GET_PROC_ADDRESS_SUCCESS);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &address, 2000, 0, NULL) == CUDA_SUCCESS);
    CHECK(address == (void *)cuMemAlloc);
    CHECK(cuGetProcAddress_v2("cuGetProcAddress", &address, 12000, 0, &status) == CUDA_SUCCESS);
    CHECK(address == (void *)cuGetProcAddress_v2);
    CHECK(cuGetProcAddress_v2("cuDeviceGetCount", &address, 12000, 0, &status) == CUDA_SUCCESS);
    CHECK(strcmp(object_of(address), "libcuda.so.1") == 0);
    CHECK(cuGetProcAddress_v2("cuNoSuch", &address, 12000, 0, &status) == CUDA_ERROR_NOT_FOUND);
    CHECK(address == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    CHECK(cuGetProcAddress_v2(NULL, &address, 12000, 0, NULL) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuGetProcAddress_v2("cuInit", NULL, 12000, 0, NULL) == CUDA_ERROR_INVALID_VALUE);
}

/* A driver that returns addresses of functions that have no symbols. libvgpu chooses the wrapper by version and stream
 * flag. */
static void check_private_entries(void)
{
    void *address = NULL;
    void *per_thread = NULL;
    begin();
    setenv("FAKE_PRIVATE_ENTRIES", "1", 1);
    CHECK(cuGetProcAddress_v2("cuStreamSynchronize", &address, 12000, 0, NULL) == CUDA_SUCCESS);
    CHECK(address == (void *)cuStreamSynchronize);
    CHECK(cuGetProcAddress_v2("cuStreamSynchronize", &per_thread, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
                              NULL) == CUDA_SUCCESS);
    CHECK(ours(per_thread) && per_thread != address);
    CHECK(cuGetProcAddress_v2("cuStreamSynchronize", &address, 2000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
                              NULL) == CUDA_SUCCESS);
    CHECK(address == (void *)cuStreamSynchronize); /* CUDA 2.0 has no per-thread variant of this function */
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &address, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, NULL) ==
          CUDA_SUCCESS);
    CHECK(address == (void *)cuMemAlloc_v2);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &address, 2000, 0, NULL) == CUDA_SUCCESS && address == (void *)cuMemAlloc);
    /*
     * a version newer than the headers: the wrapper is used if the function is the same, and never one of an older
     * function
     */
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &address, 14000, 0, NULL) == CUDA_SUCCESS);
    CHECK(address == (void *)cuMemAlloc_v2);
    CHECK(cuGetProcAddress_v2("cuMemsetD8", &address, 13000, 0, NULL) == CUDA_SUCCESS);
    CHECK(address == (void *)cuMemsetD8_v2);
    CHECK(cuGetProcAddress_v2("cuMemsetD8", &address, 14000, 0, NULL) == CUDA_SUCCESS);
    CHECK(strcmp(object_of(address), "libcuda.so.1") == 0);
}

static void check_plain(void)
{
    CUdeviceptr first;
    CUdeviceptr second;
    size_t pitch;
    begin();
    CHECK(free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemAlloc_v2(&first, 600 * MIB) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 600 * MIB);
    CHECK(cuMemAlloc_v2(&second, 600 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemAlloc_v2(&second, UINT64_MAX) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemAlloc_v2(&second, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemAlloc_v2(NULL, 1) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemAlloc_v2(&second, 1) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 602 * MIB); /* the driver uses a page of 2 MiB for the small allocation */
    CHECK(cuMemFree_v2(second) == CUDA_SUCCESS && cuMemFree_v2(first) == CUDA_SUCCESS);
    CHECK(cuMemFree_v2(first) == CUDA_ERROR_INVALID_VALUE); /* freed twice: the driver's own error */
    CHECK(cuMemFree_v2(0x1234000) == CUDA_ERROR_INVALID_VALUE && cuMemFree_v2(0) == CUDA_SUCCESS);
    CHECK(cuMemAllocPitch_v2(&first, &pitch, 100, 1000, 4) == CUDA_SUCCESS && pitch == 1024);
    CHECK(free_bytes() == LIMIT - CONTEXT - 2 * MIB);
    CHECK(cuMemFree_v2(first) == CUDA_SUCCESS);
    CHECK(cuMemAllocManaged(&first, 8 * MIB, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 8 * MIB);
    CHECK(cuMemFree_v2(first) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemGetInfo_v2(NULL, NULL) == CUDA_SUCCESS);
    size_t only;
    CHECK(cuMemGetInfo_v2(NULL, &only) == CUDA_SUCCESS && only == LIMIT);
    CHECK(cuMemGetInfo_v2(&only, NULL) == CUDA_SUCCESS && only == LIMIT - CONTEXT);
    CHECK(cuCtxSetCurrent(NULL) == CUDA_SUCCESS);
    CHECK(cuMemAlloc_v2(&first, 1) == CUDA_ERROR_INVALID_CONTEXT);
}

/* The driver's pitch is larger than libvgpu's estimate, so the allocation exceeds the limit. libvgpu frees the
 * allocation again.
 */
static void check_pitch(void)
{
    CUdeviceptr pointer;
    size_t pitch;
    begin();
    CHECK(cuMemAllocPitch_v2(&pointer, &pitch, 100, 1200 * 1024, 4) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(free_bytes() == LIMIT - CONTEXT);
}

/* Small allocations share the driver's pages. A page is freed with its last allocation. */
static void check_small(void)
{
    enum { MANY = 10000 };
    static CUdeviceptr pointers[MANY];
    begin();
    for (int i = 0; i < MANY; i++)
        CHECK(cuMemAlloc_v2(&pointers[i], 500) == CUDA_SUCCESS);
    /* 6 MiB are charged: 10000 allocations of 512 bytes are 4.9 MiB, in pages of 2 MiB */
    CHECK(free_bytes() == LIMIT - CONTEXT - 6 * MIB);
    for (int i = 0; i < MANY; i += 2)
        CHECK(cuMemFree_v2(pointers[i]) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 6 * MIB);
    for (int i = 1; i < MANY; i += 2)
        CHECK(cuMemFree_v2(pointers[i]) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemAlloc_v2(&pointers[0], MIB) == CUDA_SUCCESS && cuMemAlloc_v2(&pointers[1], MIB + 1) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 4 * MIB);
}

static void check_async(void)
{
    CUdeviceptr pointer;
    CUdeviceptr more;
    begin();
    CHECK(cuMemAllocAsync(&pointer, 500 * MIB, NULL) == CUDA_SUCCESS);
    /* 512 MiB are charged, because the pool grows in steps of 32 MiB */
    CHECK(free_bytes() == LIMIT - CONTEXT - 512 * MIB);
    CHECK(cuMemAllocAsync(&more, 10 * MIB, NULL) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 512 * MIB);
    CHECK(cuMemFree_v2(pointer) == CUDA_SUCCESS && cuMemFreeAsync(more, NULL) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 512 * MIB); /* the pool keeps the memory until the next synchronisation */
    CHECK(cuCtxSynchronize() == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemAlloc_v2(&pointer, 512 * MIB) == CUDA_SUCCESS);
    CHECK(cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 512 * MIB); /* the stream has not executed the free yet */
    CHECK(cuCtxSynchronize() == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemAllocAsync(&pointer, LIMIT, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
}

void fake_refuse_attributes(int refuse);

static void check_pool(void)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    cuuint64_t keep = UINT64_MAX;
    CUmemoryPool pool;
    CUmemoryPool other;
    CUdeviceptr pointer;
    CUdeviceptr second;
    begin();
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
    CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep) == CUDA_SUCCESS);
    CHECK(cuMemAllocAsync(&pointer, 700 * MIB, NULL) == CUDA_SUCCESS && cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
    CHECK(cuCtxSynchronize() == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 704 * MIB); /* memory that a pool keeps counts */
    CHECK(cuMemPoolTrimTo(pool, 100 * MIB) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 128 * MIB);
    CHECK(cuMemAllocAsync(&second, 700 * MIB, NULL) == CUDA_SUCCESS && second == pointer);
    /* the pool grew again for a block at its earlier address; the fake driver checks the charge at each allocation */
    CHECK(cuMemAlloc_v2(&second, 4 * MIB) == CUDA_SUCCESS && cuMemFree_v2(second) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 704 * MIB && cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
    CHECK(cuMemAlloc_v2(&pointer, 600 * MIB) == CUDA_SUCCESS); /* a pool's unused memory is freed for the allocation */
    CHECK(free_bytes() == LIMIT - CONTEXT - 600 * MIB && cuMemFree_v2(pointer) == CUDA_SUCCESS);
    CHECK(cuMemPoolCreate(&other, &props) == CUDA_SUCCESS);
    CHECK(cuMemAllocFromPoolAsync(&pointer, LIMIT, other, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemAllocFromPoolAsync(&pointer, 64 * MIB, other, NULL) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 64 * MIB);
    CHECK(cuDeviceSetMemPool(0, other) == CUDA_SUCCESS);
    CHECK(cuMemAllocAsync(&second, MIB, NULL) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 96 * MIB);
    CHECK(cuMemFreeAsync(second, NULL) == CUDA_SUCCESS && cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
    CHECK(cuDeviceSetMemPool(0, pool) == CUDA_SUCCESS);
    CHECK(cuMemPoolDestroy(other) == CUDA_SUCCESS && becomes_free(LIMIT - CONTEXT));
    CHECK(cuMemPoolCreate(&other, &props) == CUDA_SUCCESS);
    CHECK(cuMemAllocFromPoolAsync(&pointer, 64 * MIB, other, NULL) == CUDA_SUCCESS);
    CHECK(cuMemPoolDestroy(other) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 64 * MIB); /* allocations that are still in use outlive their pool */
    CHECK(cuMemAllocAsync(&second, LIMIT - CONTEXT - 32 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS && cuCtxSynchronize() == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemAllocAsync(&pointer, 64 * MIB, NULL) == CUDA_SUCCESS);
    /* the driver reports no size of the pool, as after an error that ends the context: its charge stays */
    fake_refuse_attributes(1);
    CHECK(cuMemAlloc_v2(&second, 4 * MIB) == CUDA_SUCCESS && cuMemFree_v2(second) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 64 * MIB);
    fake_refuse_attributes(0);
    CHECK(cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
}

static void check_graph(void)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                           .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}},
                                             .bytesize = 300 * MIB};
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec exec;
    CUgraphExec large;
    begin();
    CHECK(cuGraphCreate(&graph, 0) == CUDA_SUCCESS);
    CHECK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters) == CUDA_SUCCESS);
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CHECK(cuGraphLaunch(exec, NULL) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 320 * MIB);
    CHECK(cuGraphLaunch(exec, NULL) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 320 * MIB);
    parameters.bytesize = 700 * MIB;
    CHECK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters) == CUDA_SUCCESS);
    CHECK(cuGraphInstantiateWithFlags(&large, graph, 0) == CUDA_SUCCESS);
    CHECK(cuGraphLaunch(large, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuDeviceGraphMemTrim(0) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CHECK(cuGraphLaunch(large, NULL) == CUDA_ERROR_OUT_OF_MEMORY && cuGraphLaunch(exec, NULL) == CUDA_SUCCESS);
    CHECK(cuGraphExecDestroy(large) == CUDA_SUCCESS && cuGraphExecDestroy(exec) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 320 * MIB); /* the device keeps the graphs' memory */
    CHECK(cuDeviceGraphMemTrim(0) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    CUDA_GRAPH_INSTANTIATE_PARAMS upload = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
    /* graphs of 300 and 700 MiB */
    CHECK(cuGraphInstantiateWithParams(&exec, graph, &upload) == CUDA_ERROR_OUT_OF_MEMORY);
    parameters.bytesize = 300 * MIB;
    CHECK(cuGraphCreate(&graph, 0) == CUDA_SUCCESS);
    CHECK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters) == CUDA_SUCCESS);
    CHECK(cuGraphInstantiateWithParams(&exec, graph, &upload) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 320 * MIB);
}

static void check_graph_node(void)
{
    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec exec;
    begin();
    parameters.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    parameters.alloc.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    parameters.alloc.bytesize = 300 * MIB;
    CHECK(cuGraphCreate(&graph, 0) == CUDA_SUCCESS);
    CHECK(cuGraphAddNode_v3(&node, graph, NULL, NULL, 0, &parameters) == CUDA_SUCCESS);
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS);
    CHECK(cuGraphLaunch(exec, NULL) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 320 * MIB);
}

int fake_capture_questions(void);

/* Returns whether libvgpu knows of a capture: only then it queries streams. */
static bool knows_of_a_capture(void)
{
    CUdeviceptr pointer;
    int before = fake_capture_questions();
    CHECK(cuMemAllocAsync(&pointer, MIB, NULL) == CUDA_SUCCESS && cuMemFreeAsync(pointer, NULL) == CUDA_SUCCESS);
    return fake_capture_questions() > before;
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph);

static void check_captures(void)
{
    CUstreamCigCaptureParams parameters = {0};
    CUgraph graph;
    begin();
    CHECK(!knows_of_a_capture());
    CHECK(cuStreamBeginRecaptureToGraph(NULL, CU_STREAM_CAPTURE_MODE_RELAXED, NULL, NULL, NULL) == CUDA_SUCCESS);
    CHECK(knows_of_a_capture());
    CHECK(cuStreamEndCapture(NULL, &graph) == CUDA_SUCCESS && !knows_of_a_capture());
    /* the thread's own stream has two names */
    CHECK(cuStreamBeginRecaptureToGraph(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED, NULL, NULL, NULL) ==
          CUDA_SUCCESS);
    CHECK(knows_of_a_capture());
    CHECK(cuStreamEndCapture_ptsz(NULL, &graph) == CUDA_SUCCESS && !knows_of_a_capture());
    CHECK(cuStreamBeginCaptureToCig(NULL, &parameters) == CUDA_SUCCESS && knows_of_a_capture());
    CHECK(cuStreamEndCaptureToCig(NULL) == CUDA_SUCCESS && !knows_of_a_capture());
}

static CUstream captured_stream(void)
{
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && !knows_of_a_capture());
    CHECK(cuStreamBeginRecaptureToGraph(stream, CU_STREAM_CAPTURE_MODE_RELAXED, NULL, NULL, NULL) == CUDA_SUCCESS);
    CHECK(knows_of_a_capture());
    return stream;
}

static void check_cut_captures(void)
{
    begin();
    CHECK(cuStreamDestroy_v2(captured_stream()) == CUDA_SUCCESS && !knows_of_a_capture());
    CUstream stream = captured_stream();
    CHECK(cuStreamDestroy_v2((CUstream)((char *)stream + 64)) == CUDA_SUCCESS && knows_of_a_capture());
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    begin();
    CHECK(!knows_of_a_capture());
}

/* Memory that the driver allocates without a call of the program for it: global variables, local memory, streams. */
static void check_driver(void)
{
    CUmodule module;
    CUmodule large;
    CUfunction function;
    CUstream stream;
    CUdeviceptr pointer;
    size_t stack;
    begin();
    CHECK(cuModuleLoadData(&module, "104857600 65536") == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 100 * MIB);
    CHECK(cuModuleLoadData(&large, "1048576000 0") == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(free_bytes() == LIMIT - CONTEXT - 100 * MIB);
    /* 64 KiB for each of 1024 threads; the context has 1 KiB for each already */
    CHECK(cuModuleGetFunction(&function, module, "f") == CUDA_SUCCESS);
    CHECK(cuCtxGetLimit(&stack, CU_LIMIT_STACK_SIZE) == CUDA_SUCCESS && stack == 65536);
    CHECK(free_bytes() == LIMIT - CONTEXT - 163 * MIB);
    CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, MIB) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemAlloc_v2(&pointer, 780 * MIB) == CUDA_SUCCESS);
    CHECK(cuModuleLoadData(&large, "0 131072") == CUDA_SUCCESS);
    CHECK(cuModuleGetFunction(&function, large, "f") == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemFree_v2(pointer) == CUDA_SUCCESS);
    CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 100 * MIB);
    CHECK(cuStreamCreate(&stream, 0) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 101 * MIB);
    CHECK(cuMemAlloc_v2(&pointer, LIMIT - CONTEXT - 102 * MIB) == CUDA_SUCCESS && free_bytes() < 2 * MIB);
    CHECK(cuStreamCreate(&stream, 0) == CUDA_ERROR_OUT_OF_MEMORY && cuMemFree_v2(pointer) == CUDA_SUCCESS);
    CHECK(cuModuleUnload(module) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - MIB);
}

static void check_vmm(void)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUdeviceptr at = 0x10000000;
    begin();
    CHECK(cuMemCreate(&handle, 100 * MIB, &prop, 0) == CUDA_SUCCESS);
    CHECK(cuMemMap(at, 100 * MIB, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 100 * MIB); /* the memory is still mapped */
    CHECK(cuMemUnmap(at, 100 * MIB) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT);
    CHECK(cuMemCreate(&handle, LIMIT, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    prop.location.id = 1; /* device 1 is not in the lease */
    CHECK(cuMemCreate(&handle, MIB, &prop, 0) == CUDA_ERROR_NOT_PERMITTED);
    CHECK(cuCtxSetCurrent(NULL) == CUDA_SUCCESS); /* cuMemCreate needs no context */
    prop.location.id = 0;
    CHECK(cuMemCreate(&handle, MIB, &prop, 0) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
}

static void check_array(void)
{
    CUDA_ARRAY_DESCRIPTOR shape = {.Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUarray array;
    begin();
    CHECK(cuArrayCreate_v2(&array, &shape) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT - CONTEXT - 16 * MIB);
    CHECK(cuArrayDestroy(array) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    shape.Width = shape.Height = 64; /* the array shares a page with others, so libvgpu has to measure its size */
    CHECK(cuArrayCreate_v2(&array, &shape) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT - 2 * MIB);
    CHECK(cuArrayDestroy(array) == CUDA_SUCCESS && free_bytes() == LIMIT - CONTEXT);
    shape.Width = 1024;
    shape.Height = 65536;
    CHECK(cuArrayCreate_v2(&array, &shape) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuArrayCreate_v2(&array, NULL) == CUDA_ERROR_INVALID_VALUE);
}

static void check_context(void)
{
    CUdeviceptr pointer;
    CUcontext other;
    size_t total;
    begin();
    CHECK(cuDevicePrimaryCtxRetain(&other, 1) == CUDA_ERROR_NOT_PERMITTED);
    CHECK(cuDeviceTotalMem_v2(&total, 0) == CUDA_SUCCESS && total == LIMIT);
    CHECK(cuDeviceTotalMem_v2(&total, 1) == CUDA_SUCCESS && total == 8192 * MIB);
    CHECK(cuDevicePrimaryCtxRetain(&other, 0) == CUDA_SUCCESS && other == context);
    CHECK(cuMemAlloc_v2(&pointer, 100 * MIB) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    /* the memory is still charged: one reference to the handle is left */
    CHECK(free_bytes() == LIMIT - CONTEXT - 100 * MIB);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    CHECK(free_bytes() == LIMIT); /* the context and all memory of the child process are freed */
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT);
}

static void check_card_full(void)
{
    CUdeviceptr pointer;
    begin();
    setenv("FAKE_CARD_BYTES", "1048576", 1);
    CHECK(cuMemAlloc_v2(&pointer, 100 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(free_bytes() == LIMIT - CONTEXT); /* the driver holds no memory any more, so no charge is left */
}

static void check_fork(void)
{
    CUdeviceptr pointer;
    begin();
    CHECK(cuMemAlloc_v2(&pointer, 100 * MIB) == CUDA_SUCCESS);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr own;
        begin(); /* the child has a slot of its own, so its memory is added to the parent's */
        uint64_t left = free_bytes();
        CHECK(left <= LIMIT - CONTEXT - 100 * MIB);
        CHECK(cuMemAlloc_v2(&own, 50 * MIB) == CUDA_SUCCESS && free_bytes() == left - 50 * MIB);
        /* the allocation belongs to the parent, so the child's free fails and removes no charge */
        CHECK(cuMemFree_v2(pointer) != CUDA_SUCCESS);
        CHECK(free_bytes() == left - 50 * MIB);
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(cuMemFree_v2(pointer) == CUDA_SUCCESS);
}

static void check_signals(void)
{
    sigset_t before;
    sigset_t after;
    struct sigaction action;
    mode_t mask = umask(027);
    sigemptyset(&before); /* the system call writes only part of a sigset_t */
    sigemptyset(&after);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    begin();
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < 32; number++)
        CHECK(sigismember(&before, number) == sigismember(&after, number));
    CHECK(umask(mask) == 027);
    for (int number = 1; number < 32; number++)
        CHECK(sigaction(number, NULL, &action) != 0 || action.sa_handler == SIG_DFL);
}

/* NVML lists the tenant's own processes with the lease's figures. */
static void check_processes(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    nvmlReturn_t (*init)(void) = (nvmlReturn_t (*)(void))dlsym(library, "nvmlInit_v2");
    nvmlReturn_t (*by_index)(unsigned, nvmlDevice_t *) = (nvmlReturn_t (*)(unsigned, nvmlDevice_t *))dlsym(
        library, "nvmlDeviceGetHandleByIndex_v2");
    nvmlReturn_t (*list)(nvmlDevice_t, unsigned *, nvmlProcessInfo_t *) = (nvmlReturn_t (*)(
        nvmlDevice_t, unsigned *, nvmlProcessInfo_t *))dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    nvmlProcessInfo_t processes[4];
    nvmlDevice_t device;
    CUdeviceptr pointer;
    unsigned count = 0;
    CHECK(init() == NVML_SUCCESS && by_index(0, &device) == NVML_SUCCESS);
    CHECK(list(device, &count, NULL) == NVML_SUCCESS && count == 0); /* no process has called cuInit yet */
    begin();
    CHECK(cuMemAlloc_v2(&pointer, 100 * MIB) == CUDA_SUCCESS);
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        char byte = 1;
        begin();
        CHECK(cuMemAlloc_v2(&pointer, 10 * MIB) == CUDA_SUCCESS && write(ready[1], &byte, 1) == 1);
        pause();
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    count = 0;
    CHECK(list(device, &count, NULL) == NVML_ERROR_INSUFFICIENT_SIZE && count == 2);
    count = 4;
    CHECK(list(device, &count, processes) == NVML_SUCCESS && count == 2);
    int own = processes[0].pid == (unsigned)getpid() ? 0 : 1;
    CHECK(processes[own].pid == (unsigned)getpid() && processes[own].usedGpuMemory == CONTEXT + 100 * MIB);
    CHECK(processes[1 - own].pid == (unsigned)child);
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child);
    count = 4;
    CHECK(list(device, &count, processes) == NVML_SUCCESS && count == 1);
}

static void check_nvml(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    nvmlReturn_t (*init)(void) = (nvmlReturn_t (*)(void))dlsym(library, "nvmlInit_v2");
    nvmlReturn_t (*by_index)(unsigned, nvmlDevice_t *) = (nvmlReturn_t (*)(unsigned, nvmlDevice_t *))dlsym(
        library, "nvmlDeviceGetHandleByIndex_v2");
    nvmlReturn_t (*info)(nvmlDevice_t, nvmlMemory_t *) = (nvmlReturn_t (*)(nvmlDevice_t, nvmlMemory_t *))dlsym(
        library, "nvmlDeviceGetMemoryInfo");
    nvmlReturn_t (*info2)(nvmlDevice_t, nvmlMemory_v2_t *) = (nvmlReturn_t (*)(nvmlDevice_t, nvmlMemory_v2_t *))dlsym(
        library, "nvmlDeviceGetMemoryInfo_v2");
    nvmlMemory_t memory;
    nvmlMemory_v2_t memory2 = {.version = nvmlMemory_v2};
    nvmlDevice_t device;
    CHECK(init() == NVML_SUCCESS && by_index(0, &device) == NVML_SUCCESS);
    /* no process has called cuInit yet */
    CHECK(info(device, &memory) == NVML_SUCCESS && memory.total == LIMIT && memory.used == 0);
    begin();
    CHECK(info(device, &memory) == NVML_SUCCESS);
    CHECK(memory.total == LIMIT && memory.used == CONTEXT && memory.free == LIMIT - CONTEXT);
    CHECK(info2(device, &memory2) == NVML_SUCCESS && memory2.total == LIMIT && memory2.reserved == 0);
    CHECK(memory2.used == CONTEXT && memory2.free == LIMIT - CONTEXT);
    CHECK(by_index(1, &device) == NVML_SUCCESS && info(device, &memory) == NVML_SUCCESS);
    CHECK(memory.total == 8192 * MIB); /* device 1 is not in the lease, so NVML reports the device's own figures */
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*check)(void);
    } checks[] = {{"ways-in", check_ways_in},
                  {"proc-address", check_proc_address},
                  {"plain", check_plain},
                  {"async", check_async},
                  {"vmm", check_vmm},
                  {"array", check_array},
                  {"context", check_context},
                  {"card-full", check_card_full},
                  {"fork", check_fork},
                  {"signals", check_signals},
                  {"nvml", check_nvml},
                  {"small", check_small},
                  {"pool", check_pool},
                  {"graph", check_graph},
                  {"driver", check_driver},
                  {"processes", check_processes},
                  {"pitch", check_pitch},
                  {"private-entries", check_private_entries},
                  {"graph-node", check_graph_node},
                  {"captures", check_captures},
                  {"cut-captures", check_cut_captures}};
    for (size_t i = 0; argc == 2 && i < sizeof(checks) / sizeof(checks[0]); i++)
        if (strcmp(argv[1], checks[i].name) == 0) {
            checks[i].check();
            return 0;
        }
    return 2;
}

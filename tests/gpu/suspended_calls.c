/*
 * suspended_calls.c: which of the driver's functions return in a checkpointed process.
 *
 * suspended_calls [FUNCTION ...] all, if none is named
 *
 * Each is called first by a process of its own, which has a context, a stream, an event, memory, a function, a graph
 * and a library with a kernel that was never launched, and was checkpointed before. JSON lines: "answers" with the
 * result, "blocks" (no answer in WAIT_MS), or "ends" (the process does). libvgpu is not loaded: it has to wrap every
 * function that blocks or ends the process here.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAVE 32
#define WAIT_MS 250
#define MOST 128

static void *driver;
static CUcontext context;
static CUstream stream;
static CUevent event;
static CUdeviceptr memory;
static void *host;
static CUmodule module;
static CUfunction function;
static CUlibrary library;
static CUkernel kernel;
static CUmemoryPool pool;
static CUkernel late; /* a function of a binary image, which the driver loads at its first use */
static CUfunction late_function;
static CUgraph graph;
static CUgraphNode node;
static CUgraphExec executable;
static CUDA_KERNEL_NODE_PARAMS once = {
    .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1};
static const CUmemAllocationProp plain = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static CUDA_RESOURCE_DESC linear = {
    .resType = CU_RESOURCE_TYPE_LINEAR,
    .res.linear = {.format = CU_AD_FORMAT_FLOAT, .numChannels = 1, .sizeInBytes = 4096}};
static const CUDA_TEXTURE_DESC texture;
static CUpointer_attribute type_of_memory = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;

/* buffers for the results of the calls */
static int number;
static size_t size;
static unsigned flags;
static void *pointer;
static char text[4096];
static float real;

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .global .align 4 .b8 g[64];\n"
                          ".visible .entry e(){ ret; }\n.visible .entry late(){ ret; }\n"
                          ".visible .entry got(){ ret; }\n";

static void *need(const char *name)
{
    void *found = dlsym(driver, name);
    if (found == NULL)
        _Exit(4);
    return found;
}
#define CALL(symbol) ((__typeof__(&symbol))need(#symbol))
#define MUST(symbol, ...)                                       \
    do {                                                        \
        CUresult result_ = CALL(symbol)(__VA_ARGS__);           \
        if (result_ != CUDA_SUCCESS) {                          \
            fprintf(stderr, "%s: %d\n", #symbol, (int)result_); \
            _Exit(5);                                           \
        }                                                       \
    } while (0)

#define TRY(symbol, ...)                  \
    static CUresult try_##symbol(void)    \
    {                                     \
        return CALL(symbol)(__VA_ARGS__); \
    }
/* Tests the same function with other arguments. */
#define TRY_MORE(name, label, symbol, ...) \
    static CUresult try_##name(void)       \
    {                                      \
        return CALL(symbol)(__VA_ARGS__);  \
    }
/* Lists of calls, in the order in which they are made. */
/* clang-format off */
#define MORE_CALLS(X)                                                                                  \
    X(cast, "cuFuncGetAttribute of a kernel", cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, (CUfunction)late) \
    X(late, "cuFuncGetAttribute of a kernel's function", cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, \
      late_function)                                                                                   \
    X(set, "cuFuncSetAttribute of a kernel", cuFuncSetAttribute, (CUfunction)late,                     \
      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 0)                                              \
    X(module, "cuFuncGetModule of a kernel's function", cuFuncGetModule, &module, late_function)       \
    X(name, "cuFuncGetName of a kernel", cuFuncGetName, (const char **)&pointer, (CUfunction)late)     \
    X(kernel, "cuKernelGetAttribute of a late kernel", cuKernelGetAttribute, &number,                  \
      CU_FUNC_ATTRIBUTE_NUM_REGS, late, 0)                                                             \
    X(function, "cuKernelGetFunction of a late kernel", cuKernelGetFunction, &function, late)          \
    X(clock, "cuDeviceGetAttribute of the clock", cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 0) \
    X(mode, "cuDeviceGetAttribute of the mode", cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0) \
    X(range, "cuPointerGetAttribute of the range", cuPointerGetAttribute, text, CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory) \
    X(handles, "cuPointerGetAttribute of the handles", cuPointerGetAttribute, text,                    \
      CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, memory)                                               \
    X(host, "cuPointerGetAttribute of the host's", cuPointerGetAttribute, text,                        \
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)host)
#define CALLS(X)                                                                                       \
    X(cuCtxGetCurrent, &context) X(cuCtxGetDevice, &number) X(cuCtxSetCurrent, context)                \
    X(cuCtxGetFlags, &flags) X(cuCtxGetLimit, &size, CU_LIMIT_STACK_SIZE) X(cuInit, 0)                 \
    X(cuDeviceGetName, text, 64, 0) X(cuDeviceGetCount, &number)                                       \
    X(cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0)                                 \
    X(cuDevicePrimaryCtxGetState, 0, &flags, &number)                                                  \
    X(cuStreamQuery, stream) X(cuStreamSynchronize, stream) X(cuStreamGetFlags, stream, &flags)        \
    X(cuStreamGetCtx, stream, &context) X(cuStreamGetPriority, stream, &number)                        \
    X(cuStreamIsCapturing, stream, (CUstreamCaptureStatus *)&number)                                   \
    X(cuEventQuery, event) X(cuEventRecord, event, stream) X(cuEventElapsedTime, &real, event, event)  \
    X(cuEventSynchronize, event) X(cuEventDestroy_v2, event) X(cuCtxSynchronize)                       \
    X(cuPointerGetAttribute, &number, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory)                        \
    X(cuMemGetAddressRange_v2, NULL, &size, memory) X(cuMemGetInfo_v2, &size, &size)                   \
    X(cuMemAlloc_v2, &memory, 4096) X(cuMemFree_v2, memory) X(cuMemFreeHost, host)                     \
    X(cuMemHostAlloc, &host, 4096, 0) X(cuMemHostGetFlags, &flags, host)                               \
    X(cuMemsetD8Async, memory, 0, 16, stream) X(cuMemcpyDtoH_v2, text, memory, 16)                     \
    X(cuDeviceGetDefaultMemPool, &pool, 0) X(cuModuleGetFunction, &function, module, "e")              \
    X(cuModuleLoadData, &module, ptx) X(cuModuleGetLoadingMode, (CUmoduleLoadingMode *)&number)        \
    X(cuFuncGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, function)                               \
    X(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 0)                \
    X(cuFuncGetModule, &module, function) X(cuFuncGetName, (const char **)&pointer, function)          \
    X(cuFuncIsLoaded, (CUfunctionLoadingState *)&number, function)                                     \
    X(cuLibraryGetKernel, &kernel, library, "e") X(cuKernelGetFunction, &function, kernel)             \
    X(cuKernelGetAttribute, &number, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, 0)                            \
    X(cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 0, kernel, 0)             \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, &number, function, 128, 0)                          \
    X(cuCtxGetId, context, (unsigned long long *)text) X(cuStreamGetId, stream, (unsigned long long *)text) \
    X(cuStreamGetGreenCtx, stream, (CUgreenCtx *)&pointer)                                             \
    X(cuCtxGetDevResource, context, (CUdevResource *)text, CU_DEV_RESOURCE_TYPE_SM)                    \
    X(cuDeviceGetDevResource, 0, (CUdevResource *)text, CU_DEV_RESOURCE_TYPE_SM)                       \
    X(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)                               \
    X(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING) X(cuEventCreate, &event, 0)                     \
    X(cuGraphCreate, (CUgraph *)&pointer, 0) X(cuDevicePrimaryCtxRetain, &context, 0)                  \
    X(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED) X(cuDriverGetVersion, &number)  \
    X(cuStreamGetCaptureInfo_v2, stream, (CUstreamCaptureStatus *)&number, NULL, NULL, NULL, NULL)     \
    X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)&number)                               \
    X(cuModuleGetGlobal_v2, &memory, &size, module, "g") X(cuModuleUnload, module)                     \
    X(cuLibraryLoadData, &library, ptx, NULL, NULL, 0, NULL, NULL, 0)                                  \
    X(cuLibraryGetGlobal, &memory, &size, library, "g")                                                \
    X(cuLinkCreate_v2, 0, NULL, NULL, (CUlinkState *)&pointer)                                         \
    X(cuMemAddressReserve, &memory, 2 << 20, 0, 0, 0) X(cuMemCreate, (CUmemGenericAllocationHandle *)text, 2 << 20, &plain, 0)  \
    X(cuMemGetAllocationGranularity, &size, &plain, CU_MEM_ALLOC_GRANULARITY_MINIMUM)                  \
    X(cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, text) X(cuMemPoolTrimTo, pool, 0) \
    X(cuMemAllocAsync, &memory, 4096, stream) X(cuDeviceGetMemPool, &pool, 0)                          \
    X(cuMemHostGetDevicePointer_v2, &memory, host, 0)                                                  \
    X(cuPointerGetAttributes, 1, &type_of_memory, &pointer, memory)                                    \
    X(cuDeviceCanAccessPeer, &number, 0, 0) X(cuDeviceTotalMem_v2, &size, 0)                           \
    X(cuDeviceGetUuid_v2, (CUuuid *)text, 0) X(cuDeviceGetPCIBusId, text, 64, 0) X(cuDeviceGet, &number, 0) \
    X(cuDeviceGetGraphMemAttribute, 0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, text)                       \
    X(cuCtxGetStreamPriorityRange, &number, &number) X(cuCtxGetApiVersion, context, &flags)            \
    X(cuCtxPushCurrent_v2, context) X(cuCtxPopCurrent_v2, &context)                                    \
    X(cuTexObjectCreate, (CUtexObject *)text, &linear, &texture, NULL)                                 \
    X(cuGraphAddKernelNode_v2, &node, graph, NULL, 0, &once) X(cuGraphAddEmptyNode, &node, graph, NULL, 0) \
    X(cuGraphKernelNodeGetParams_v2, node, &once) X(cuGraphGetNodes, graph, NULL, &size)               \
    X(cuGraphClone, &graph, graph) X(cuGraphInstantiateWithFlags, &executable, graph, 0)               \
    X(cuGraphExecKernelNodeSetParams_v2, executable, node, &once)                                      \
    X(cuGraphLaunch, executable, stream) X(cuGraphDestroy, graph)                                      \
    X(cuLogsCurrent, (CUlogIterator *)text, 0) X(cuGetErrorName, CUDA_SUCCESS, (const char **)&pointer) \
    X(cuGetProcAddress_v2, "cuMemAlloc", &pointer, 12000, 0, (CUdriverProcAddressQueryResult *)&number)
/* clang-format on */

CALLS(TRY)
MORE_CALLS(TRY_MORE)

static const struct call {
    const char *name;
    CUresult (*make)(void);
} calls[] = {
#define ROW(symbol, ...) {#symbol, try_##symbol},
#define ROW_MORE(name, label, ...) {label, try_##name},
    CALLS(ROW) MORE_CALLS(ROW_MORE)};
#define COUNT (sizeof(calls) / sizeof(calls[0]))

static struct child {
    pid_t pid;
    int to;
    int from;
} children[MOST];

/*
 * Links the program to a binary image, because only a binary is loaded lazily. If the driver cannot link, returns PTX
 * text.
 */
static const void *binary(void)
{
    CUlinkState link;
    void *image = NULL;
    if (dlsym(driver, "cuLinkCreate_v2") == NULL)
        return ptx;
    MUST(cuLinkCreate_v2, 0, NULL, NULL, &link);
    MUST(cuLinkAddData_v2, link, CU_JIT_INPUT_PTX, (void *)ptx, sizeof(ptx), "text", 0, NULL, NULL);
    MUST(cuLinkComplete, link, &image, &size);
    return image; /* the link stays, because it owns the image */
}

static void make_late(void)
{
    CUlibrary unused;
    CUkernel got;
    MUST(cuLibraryLoadData, &unused, binary(), NULL, NULL, 0, NULL, NULL, 0);
    MUST(cuLibraryGetKernel, &late, unused, "late");
    MUST(cuLibraryGetKernel, &got, unused, "got");
    MUST(cuKernelGetFunction, &late_function, got);
}

static void make_graph(void)
{
    once.func = function;
    MUST(cuGraphCreate, &graph, 0);
    MUST(cuGraphAddKernelNode_v2, &node, graph, NULL, 0, &once);
    MUST(cuGraphInstantiateWithFlags, &executable, graph, 0);
    MUST(cuGraphLaunch, executable, stream);
}

static void live(const struct call *call, int from, int to)
{
    char order = 'r';
    /* waits, because the device has no room for the contexts of all processes at once */
    if (read(from, &order, 1) != 1)
        _Exit(5);
    MUST(cuInit, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    MUST(cuCtxSetCurrent, context);
    MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    MUST(cuEventCreate, &event, 0);
    MUST(cuEventRecord, event, stream);
    MUST(cuMemAlloc_v2, &memory, 1 << 20);
    MUST(cuMemHostAlloc, &host, 4096, 0);
    MUST(cuModuleLoadData, &module, ptx);
    MUST(cuModuleGetFunction, &function, module, "e");
    MUST(cuLibraryLoadData, &library, ptx, NULL, NULL, 0, NULL, NULL, 0);
    MUST(cuLibraryGetKernel, &kernel, library, "e");
    MUST(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    linear.res.linear.devPtr = memory;
    pointer = text; /* a buffer for cuPointerGetAttributes */
    make_late();
    make_graph();
    MUST(cuCtxSynchronize);
    if (write(to, &order, 1) != 1 || read(from, &order, 1) != 1)
        _Exit(6);
    CUresult result = call->make();
    if (write(to, &result, sizeof(result)) != (ssize_t)sizeof(result))
        _Exit(7);
    pause();
}

static void start(size_t index)
{
    int there[2], back[2];
    if (pipe(there) != 0 || pipe(back) != 0)
        _Exit(3);
    children[index].pid = fork();
    if (children[index].pid == 0) {
        live(&calls[index], there[0], back[1]);
        _Exit(0);
    }
    close(there[0]);
    close(back[1]);
    children[index].to = there[1];
    children[index].from = back[0];
}

static void ask(size_t index)
{
    const struct child *child = &children[index];
    CUcheckpointLockArgs lock = {.timeoutMs = 5000};
    CUcheckpointCheckpointArgs save = {0};
    CUresult result = CUDA_SUCCESS;
    struct pollfd there = {.fd = child->from, .events = POLLIN};
    const char *what = "blocks";
    char order;
    if (read(child->from, &order, 1) != 1) {
        what = "did not start";
    } else if (CALL(cuCheckpointProcessLock)(child->pid, &lock) != CUDA_SUCCESS ||
               CALL(cuCheckpointProcessCheckpoint)(child->pid, &save) != CUDA_SUCCESS) {
        what = "was not suspended";
    } else if (write(child->to, &order, 1) == 1 && poll(&there, 1, WAIT_MS) == 1) {
        what = read(child->from, &result, sizeof(result)) == (ssize_t)sizeof(result) ? "answers" : "ends";
    }
    printf("{\"call\": \"%s\", \"it\": \"%s\", \"result\": %d}\n", calls[index].name, what, (int)result);
    fflush(stdout);
    kill(child->pid, SIGKILL);
    waitpid(child->pid, NULL, 0);
}

/* Lets the next WAVE processes make their contexts at the same time. */
static void let_go(size_t first)
{
    for (size_t i = first; i < COUNT && i < first + WAVE; i++)
        if (children[i].pid != 0 && write(children[i].to, "g", 1) != 1)
            _Exit(4);
}

static int is_wanted(const char *name, char **names)
{
    for (char **one = names; *one != NULL; one++)
        if (strcmp(*one, name) == 0)
            return 1;
    return *names == NULL;
}

int main(int argc, char **argv)
{
    (void)argc;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL)
        return 2;
    for (size_t i = 0; i < COUNT; i++) /* forks before the driver is initialised in this process */
        if (is_wanted(calls[i].name, argv + 1))
            start(i);
    MUST(cuInit, 0);
    for (size_t i = 0; i < COUNT; i++) {
        if (i % WAVE == 0)
            let_go(i);
        if (children[i].pid != 0)
            ask(i);
    }
    return 0;
}

/*
 * suspended_calls.c: which of the driver's functions answer in a process that is checkpointed, and which do not.
 *
 *   suspended_calls [FUNCTION ...]      all, if none is named
 *
 * Each is called first by a process of its own, which has a context, a stream, an event, memory, a function and a
 * library, and was checkpointed before. JSON lines: "answers" with the result, "blocks" (no answer in WAIT_MS), or
 * "ends" (the process does). Without libvgpu: what blocks or ends here, libvgpu has to stand in front of.
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

/* what answers are written to */
static int number;
static size_t size;
static unsigned flags;
static void *pointer;
static char text[4096];
static float real;

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry e(){ ret; }\n";

static void *need(const char *name)
{
    void *found = dlsym(driver, name);
    if (found == NULL)
        _Exit(4);
    return found;
}
#define CALL(symbol) ((__typeof__(&symbol))need(#symbol))
#define MUST(symbol, ...)                                        \
    do {                                                         \
        CUresult result_ = CALL(symbol)(__VA_ARGS__);            \
        if (result_ != CUDA_SUCCESS) {                           \
            fprintf(stderr, "%s: %d\n", #symbol, (int)result_);  \
            _Exit(5);                                            \
        }                                                        \
    } while (0)

#define TRY(symbol, ...) \
    static CUresult try_##symbol(void) { return CALL(symbol)(__VA_ARGS__); }
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
    X(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED) X(cuDriverGetVersion, &number)

CALLS(TRY)

static const struct call {
    const char *name;
    CUresult (*make)(void);
} calls[] = {
#define ROW(symbol, ...) {#symbol, try_##symbol},
    CALLS(ROW)};
#define COUNT (sizeof(calls) / sizeof(calls[0]))

static struct child {
    pid_t pid;
    int to;
    int from;
} children[MOST];

static void live(const struct call *call, int from, int to)
{
    char order = 'r';
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
    for (size_t i = 0; i < COUNT; i++) /* before the driver is initialised here */
        if (is_wanted(calls[i].name, argv + 1))
            start(i);
    MUST(cuInit, 0);
    for (size_t i = 0; i < COUNT; i++)
        if (children[i].pid != 0)
            ask(i);
    return 0;
}

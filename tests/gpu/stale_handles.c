/*
 * stale_handles.c: the driver's result for a handle whose context has ended. Each call is made in a process of its own:
 * an object is made in a context, the context ends (cuDevicePrimaryCtxReset or cuCtxDestroy), another begins, and one
 * call is made with the old handle. Prints JSON: call -> result; -11: the driver crashed, -1: the call could not be
 * prepared, -2: no result within 20 s. cuda_conformance.py runs it on a real device and on the simulated node.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define SYMBOLS(X)                 \
    X(cuInit)                      \
    X(cuDevicePrimaryCtxRetain)    \
    X(cuDevicePrimaryCtxReset_v2)  \
    X(cuCtxCreate_v2)              \
    X(cuCtxDestroy_v2)             \
    X(cuCtxSetCurrent)             \
    X(cuCtxPushCurrent_v2)         \
    X(cuEventCreate)               \
    X(cuEventQuery)                \
    X(cuEventRecord)               \
    X(cuEventDestroy_v2)           \
    X(cuStreamCreate)              \
    X(cuStreamQuery)               \
    X(cuStreamSynchronize)         \
    X(cuStreamGetPriority)         \
    X(cuStreamWaitEvent)           \
    X(cuStreamDestroy_v2)          \
    X(cuModuleLoadData)            \
    X(cuModuleGetFunction)         \
    X(cuModuleUnload)              \
    X(cuFuncGetAttribute)          \
    X(cuLaunchKernel)              \
    X(cuArrayCreate_v2)            \
    X(cuArrayGetDescriptor_v2)     \
    X(cuArrayDestroy)              \
    X(cuMemcpyHtoA_v2)             \
    X(cuGraphCreate)               \
    X(cuGraphAddKernelNode_v2)     \
    X(cuGraphInstantiateWithFlags) \
    X(cuGraphLaunch)               \
    X(cuGraphUpload)               \
    X(cuGraphDestroy)              \
    X(cuGraphExecDestroy)          \
    X(cuMemPoolCreate)             \
    X(cuMemPoolGetAttribute)       \
    X(cuMemAllocFromPoolAsync)     \
    X(cuMemPoolDestroy)            \
    X(cuMemAlloc_v2)               \
    X(cuMemFree_v2)                \
    X(cuMemsetD8_v2)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SYMBOLS(MEMBER)
} cu;

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry one()\n{\n ret;\n}\n";

/* The objects made in the context that ends. */
static struct {
    CUcontext context;
    CUevent event;
    CUstream stream;
    CUmodule module;
    CUfunction function;
    CUarray array;
    CUgraph graph;
    CUgraphExec exec;
    CUmemoryPool pool;
    CUdeviceptr memory;
} old;

#define NEED(call)                  \
    do {                            \
        if ((call) != CUDA_SUCCESS) \
            return -1;              \
    } while (0)

static int make(void)
{
    CUDA_ARRAY_DESCRIPTOR shape = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1};
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUDA_KERNEL_NODE_PARAMS_v2 kernel = {
        .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1};
    CUgraphNode node;
    NEED(cu.cuEventCreate(&old.event, 0));
    NEED(cu.cuStreamCreate(&old.stream, CU_STREAM_NON_BLOCKING));
    NEED(cu.cuModuleLoadData(&old.module, ptx));
    NEED(cu.cuModuleGetFunction(&old.function, old.module, "one"));
    NEED(cu.cuArrayCreate_v2(&old.array, &shape));
    NEED(cu.cuGraphCreate(&old.graph, 0));
    kernel.func = old.function;
    NEED(cu.cuGraphAddKernelNode_v2(&node, old.graph, NULL, 0, &kernel));
    NEED(cu.cuGraphInstantiateWithFlags(&old.exec, old.graph, 0));
    NEED(cu.cuMemPoolCreate(&old.pool, &props));
    NEED(cu.cuMemAlloc_v2(&old.memory, 4096));
    return 0;
}

/* Creates a context and makes it current: the primary one, or another. */
static int begin(int primary, CUcontext *context)
{
    if (!primary)
        return cu.cuCtxCreate_v2(context, 0, 0) == CUDA_SUCCESS ? 0 : -1;
    NEED(cu.cuDevicePrimaryCtxRetain(context, 0));
    NEED(cu.cuCtxSetCurrent(*context));
    return 0;
}

static int end(int primary)
{
    return (primary ? cu.cuDevicePrimaryCtxReset_v2(0) : cu.cuCtxDestroy_v2(old.context)) == CUDA_SUCCESS ? 0 : -1;
}

static int attribute(void)
{
    int value;
    return cu.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, old.function);
}

static int launch(CUfunction function, CUstream stream)
{
    return cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

static int launch_on_stream(void)
{
    CUmodule module;
    CUfunction function;
    NEED(cu.cuModuleLoadData(&module, ptx));
    NEED(cu.cuModuleGetFunction(&function, module, "one"));
    return launch(function, old.stream);
}

static int priority(void)
{
    int value;
    return cu.cuStreamGetPriority(old.stream, &value);
}

static int wait_for_event(void)
{
    return cu.cuStreamWaitEvent(NULL, old.event, 0);
}

static int event_on_stream(void)
{
    CUevent event;
    NEED(cu.cuEventCreate(&event, 0));
    return cu.cuEventRecord(event, old.stream);
}

static int get_function(void)
{
    CUfunction function;
    return cu.cuModuleGetFunction(&function, old.module, "one");
}

static int describe(void)
{
    CUDA_ARRAY_DESCRIPTOR shape;
    return cu.cuArrayGetDescriptor_v2(&shape, old.array);
}

static int fill_array(void)
{
    char bytes[64] = {0};
    return cu.cuMemcpyHtoA_v2(old.array, 0, bytes, sizeof(bytes));
}

static int instantiate(void)
{
    CUgraphExec exec;
    return cu.cuGraphInstantiateWithFlags(&exec, old.graph, 0);
}

static int pool_attribute(void)
{
    cuuint64_t value;
    return cu.cuMemPoolGetAttribute(old.pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &value);
}

static int pool_allocate(void)
{
    CUdeviceptr memory;
    return cu.cuMemAllocFromPoolAsync(&memory, 4096, old.pool, NULL);
}

static int event_query(void)
{
    return cu.cuEventQuery(old.event);
}
static int event_record(void)
{
    return cu.cuEventRecord(old.event, NULL);
}
static int event_destroy(void)
{
    return cu.cuEventDestroy_v2(old.event);
}
static int stream_query(void)
{
    return cu.cuStreamQuery(old.stream);
}
static int stream_synchronize(void)
{
    return cu.cuStreamSynchronize(old.stream);
}
static int stream_destroy(void)
{
    return cu.cuStreamDestroy_v2(old.stream);
}
static int module_unload(void)
{
    return cu.cuModuleUnload(old.module);
}
static int launch_function(void)
{
    return launch(old.function, NULL);
}
static int array_destroy(void)
{
    return cu.cuArrayDestroy(old.array);
}
static int graph_destroy(void)
{
    return cu.cuGraphDestroy(old.graph);
}
static int exec_launch(void)
{
    return cu.cuGraphLaunch(old.exec, NULL);
}
static int exec_upload(void)
{
    return cu.cuGraphUpload(old.exec, NULL);
}
static int exec_destroy(void)
{
    return cu.cuGraphExecDestroy(old.exec);
}
static int pool_destroy(void)
{
    return cu.cuMemPoolDestroy(old.pool);
}
static int memory_set(void)
{
    return cu.cuMemsetD8_v2(old.memory, 1, 64);
}
static int memory_free(void)
{
    return cu.cuMemFree_v2(old.memory);
}
static int context_push(void)
{
    return cu.cuCtxPushCurrent_v2(old.context);
}

static const struct {
    const char *name;
    int (*ask)(void);
} questions[] = {
    {"event query", event_query},       {"event record", event_record},
    {"event wait", wait_for_event},     {"event destroy", event_destroy},
    {"stream query", stream_query},     {"stream synchronize", stream_synchronize},
    {"stream priority", priority},      {"stream launch", launch_on_stream},
    {"stream record", event_on_stream}, {"stream destroy", stream_destroy},
    {"module function", get_function},  {"module unload", module_unload},
    {"function attribute", attribute},  {"function launch", launch_function},
    {"array describe", describe},       {"array copy", fill_array},
    {"array destroy", array_destroy},   {"graph instantiate", instantiate},
    {"graph destroy", graph_destroy},   {"exec launch", exec_launch},
    {"exec upload", exec_upload},       {"exec destroy", exec_destroy},
    {"pool attribute", pool_attribute}, {"pool allocate", pool_allocate},
    {"pool destroy", pool_destroy},     {"memory set", memory_set},
    {"memory free", memory_free},       {"context push", context_push},
};

static int ask(int primary, int (*question)(void))
{
    CUcontext next;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return -1;
#define FIND(name)                                            \
    if ((*(void **)&cu.name = dlsym(library, #name)) == NULL) \
        return -1;
    SYMBOLS(FIND)
    NEED(cu.cuInit(0));
    if (begin(primary, &old.context) != 0 || make() != 0 || end(primary) != 0 || begin(primary, &next) != 0)
        return -1;
    return question();
}

int main(void)
{
    int *answer = mmap(NULL, sizeof(*answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const char *separator = "{";
    for (int primary = 1; primary >= 0; primary--) {
        for (size_t i = 0; i < sizeof(questions) / sizeof(questions[0]); i++) {
            int status;
            *answer = -2;
            pid_t pid = fork();
            if (pid == 0) {
                alarm(20);
                *answer = ask(primary, questions[i].ask);
                _exit(0);
            }
            waitpid(pid, &status, 0);
            if (WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM)
                *answer = -WTERMSIG(status);
            printf("%s\n\"%s, context %s\": %d", separator, questions[i].name, primary ? "reset" : "destroyed",
                   *answer);
            fflush(stdout);
            separator = ",";
        }
    }
    puts("\n}");
    return 0;
}

/*
 * cuda_conformance.c: makes a fixed series of CUDA calls and prints the results as JSON: return codes, sizes, orderings
 * and differences of cuMemGetInfo.
 *   cc -I CUDA_INCLUDE cuda_conformance*.c -ldl && ./a.out
 * Each line is "name": value. No value depends on speed, addresses, or other users of the device.
 */
#include "cuda_conformance.h"

#include <signal.h>

static void *g_driver;
static const char *g_comma = "";
static const char *g_last = "none";
sigjmp_buf question;
volatile int asking;

static void crashed(int number)
{
    if (asking) {
        asking = 0;
        siglongjmp(question, 1);
    }
    fprintf(stderr, "signal %d after the question \"%s\"\n", number, g_last);
    _Exit(3);
}
void *need(const char *name)
{
    void *f = dlsym(g_driver, name);
    if (f == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return f;
}

void said(const char *name, long long value)
{
    printf("%s\n  \"%s\": %lld", g_comma, name, value);
    g_comma = ",";
    g_last = name;
}

static size_t free_bytes(void)
{
    size_t unused, total;
    CALL(cuMemGetInfo_v2, (size_t *, size_t *), &unused, &total);
    return unused;
}

static size_t g_before;
void mark(void)
{
    g_before = free_bytes();
}
void used(const char *name)
{
    say(name, (long long)(g_before - free_bytes()));
}

CUresult alloc(CUdeviceptr *p, size_t n)
{
    return CALL(cuMemAlloc_v2, (CUdeviceptr *, size_t), p, n);
}
CUresult drop(CUdeviceptr p)
{
    return CALL(cuMemFree_v2, (CUdeviceptr), p);
}

static void plain(void)
{
    CUdeviceptr p, q[64], base;
    size_t size;
    mark();
    say("alloc 32 MiB", alloc(&p, 32 * MIB));
    used("alloc 32 MiB: bytes");
    say("address range code",
        CALL(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr), &base, &size, p + 5));
    say("address range size", (long long)size);
    say("address range base", (long long)(p - base));
    say("free inside", drop(p + 256));
    say("free", drop(p));
    say("free twice", drop(p));
    say("free null", drop(0));
    used("after free: bytes");
    say("alloc 0", alloc(&p, 0));
    say("alloc null", alloc(NULL, 1));
    say("alloc huge", alloc(&p, (size_t)1 << 50));
    mark();
    for (int i = 0; i < 64; i++)
        alloc(&q[i], 3 * MIB / 2);
    used("64 x 1.5 MiB: bytes");
    for (int i = 0; i < 64; i++)
        drop(q[i]);
    mark();
    for (int i = 0; i < 64; i++)
        alloc(&q[i], 32768);
    used("64 x 32 KiB: bytes");
    say("spacing of 32 KiB", (long long)(q[1] - q[0]));
    for (int i = 0; i < 64; i++)
        drop(q[i]);
    mark();
    say("alloc 1 byte", alloc(&p, 1));
    used("1 byte: bytes");
    say("alignment of 1 byte", (long long)(p % 512));
    drop(p);
}

static void pitched_and_arrays(void)
{
    CUdeviceptr p;
    size_t pitch;
    CUarray array;
    mark();
    say("pitch",
        CALL(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned), &p, &pitch, 1000, 4096, 4));
    say("pitch of 1000", (long long)pitch);
    used("pitch: bytes");
    drop(p);
    say("pitch, element 3",
        CALL(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned), &p, &pitch, 1000, 4, 3));
    CUDA_ARRAY_DESCRIPTOR d = {2048, 2048, CU_AD_FORMAT_FLOAT, 1};
    mark();
    say("array", CALL(cuArrayCreate_v2, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *), &array, &d));
    used("array 2048 x 2048 float: bytes");
    say("array destroy", CALL(cuArrayDestroy, (CUarray), array));
    d.NumChannels = 3;
    say("array of 3 channels", CALL(cuArrayCreate_v2, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *), &array, &d));
}

static void managed_and_host(void)
{
    CUdeviceptr p;
    void *h;
    mark();
    say("managed", CALL(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned), &p, 8 * MIB, CU_MEM_ATTACH_GLOBAL));
    used("managed, untouched: bytes");
    drop(p);
    say("managed, bad flags", CALL(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned), &p, 1, 77));
    mark();
    say("host", CALL(cuMemAllocHost_v2, (void **, size_t), &h, 8 * MIB));
    used("host: bytes");
    say("host free", CALL(cuMemFreeHost, (void *), h));
    static char mine[8192];
    say("register", CALL(cuMemHostRegister_v2, (void *, size_t, unsigned), mine, sizeof(mine), 0));
    say("register twice", CALL(cuMemHostRegister_v2, (void *, size_t, unsigned), mine, sizeof(mine), 0));
    say("unregister", CALL(cuMemHostUnregister, (void *), mine));
    say("unregister twice", CALL(cuMemHostUnregister, (void *), mine));
}

static void mapped(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle h, second;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr p;
    size_t step = 0;
    char byte = 7;
    say("granularity",
        CALL(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int), &step, &prop, 0));
    say("granularity: bytes", (long long)step);
    mark();
    say("create",
        CALL(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &h,
             4 * step, &prop, 0));
    used("create: bytes");
    say("create, size + 1",
        CALL(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long),
             &second, step + 1, &prop, 0));
    say("reserve", CALL(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &p,
                        8 * step, 0, 0, 0));
    say("map", CALL(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), p,
                    4 * step, 0, h, 0));
    say("map over", CALL(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), p,
                         4 * step, 0, h, 0));
    say("copy before access", CALL(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t), p, &byte, 1));
    say("access",
        CALL(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t), p, 4 * step, &access, 1));
    say("copy after access", CALL(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t), p, &byte, 1));
    say("release while mapped", CALL(cuMemRelease, (CUmemGenericAllocationHandle), h));
    used("released, mapped: bytes");
    say("address free while mapped", CALL(cuMemAddressFree, (CUdeviceptr, size_t), p, 8 * step));
    say("unmap", CALL(cuMemUnmap, (CUdeviceptr, size_t), p, 4 * step));
    used("unmapped: bytes");
    say("address free", CALL(cuMemAddressFree, (CUdeviceptr, size_t), p, 8 * step));
    say("release twice", CALL(cuMemRelease, (CUmemGenericAllocationHandle), h));
}

static CUresult alloc_async(CUdeviceptr *p, size_t n, CUstream s)
{
    return CALL(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream), p, n, s);
}
static CUresult free_async(CUdeviceptr p, CUstream s)
{
    return CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), p, s);
}
static CUresult sync_context(void)
{
    return CALL(cuCtxSynchronize, (void));
}

static void pools(void)
{
    CUmemoryPool pool;
    CUdeviceptr p;
    cuuint64_t v = 0, keep = UINT64_MAX;
    CALL(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice), &pool, 0);
    mark();
    say("async", alloc_async(&p, 16 * MIB, NULL));
    sync_context();
    used("async 16 MiB: bytes");
    CALL(cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
         &v);
    say("async 16 MiB: pool used", (long long)v);
    say("async free", free_async(p, NULL));
    sync_context();
    used("async freed: bytes");
    CALL(cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
         &keep);
    alloc_async(&p, 48 * MIB, NULL);
    free_async(p, NULL);
    sync_context();
    used("async freed, kept: bytes");
    CALL(cuMemPoolTrimTo, (CUmemoryPool, size_t), pool, 0);
    used("trimmed: bytes");
    say("async free of plain", (alloc(&p, MIB), free_async(p, NULL)));
    say("async alloc 0", alloc_async(&p, 0, NULL));
    say("async free null", free_async(0, NULL));
}

static const char g_ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 4 .b8 table[64];\n"
                            ".visible .entry work()\n{\nret;\n}\n.visible .entry other()\n{\nret;\n}\n";
static CUfunction g_work;

CUresult launch(CUstream s, unsigned grid, unsigned block, unsigned shared)
{
    return CALL(
        cuLaunchKernel,
        (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **),
        g_work, grid, 1, 1, block, 1, 1, shared, s, NULL, NULL);
}

static void modules(void)
{
    CUmodule m;
    CUfunction f;
    CUdeviceptr p;
    size_t n = 0;
    int value = 0;
    say("module", CALL(cuModuleLoadData, (CUmodule *, const void *), &m, g_ptx));
    say("entry", CALL(cuModuleGetFunction, (CUfunction *, CUmodule, const char *), &g_work, m, "work"));
    say("no entry", CALL(cuModuleGetFunction, (CUfunction *, CUmodule, const char *), &f, m, "wor"));
    say("global", CALL(cuModuleGetGlobal_v2, (CUdeviceptr *, size_t *, CUmodule, const char *), &p, &n, m, "table"));
    say("global: bytes", (long long)n);
    say("no global", CALL(cuModuleGetGlobal_v2, (CUdeviceptr *, size_t *, CUmodule, const char *), &p, &n, m, "tab"));
    say("max threads", CALL(cuFuncGetAttribute, (int *, CUfunction_attribute, CUfunction), &value,
                            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, g_work));
    say("max threads: count", value);
    say("launch", launch(NULL, 1, 32, 0));
    say("launch, grid 0", launch(NULL, 0, 32, 0));
    say("launch, 1025 threads", launch(NULL, 1, 1025, 0));
    say("launch, 64 KiB shared", launch(NULL, 1, 32, 65536));
    say("sync", sync_context());
}

static void streams(void)
{
    CUstream s;
    CUevent a, b;
    float ms = -1;
    int least = 9, greatest = 9;
    CALL(cuCtxGetStreamPriorityRange, (int *, int *), &least, &greatest);
    say("least priority", least);
    say("greatest priority", greatest);
    say("stream", CALL(cuStreamCreate, (CUstream *, unsigned), &s, CU_STREAM_NON_BLOCKING));
    say("stream, bad flags", CALL(cuStreamCreate, (CUstream *, unsigned), &s, 8));
    CALL(cuEventCreate, (CUevent *, unsigned), &a, 0);
    CALL(cuEventCreate, (CUevent *, unsigned), &b, 0);
    say("elapsed, not recorded", CALL(cuEventElapsedTime, (float *, CUevent, CUevent), &ms, a, b));
    say("query, not recorded", CALL(cuEventQuery, (CUevent), a));
    CALL(cuEventRecord, (CUevent, CUstream), a, s);
    launch(s, 1, 32, 0);
    CALL(cuEventRecord, (CUevent, CUstream), b, s);
    say("event sync", CALL(cuEventSynchronize, (CUevent), b));
    say("event query", CALL(cuEventQuery, (CUevent), b));
    say("stream query", CALL(cuStreamQuery, (CUstream), s));
    say("elapsed", CALL(cuEventElapsedTime, (float *, CUevent, CUevent), &ms, a, b));
    say("elapsed is not negative", ms >= 0);
    say("stream destroy", CALL(cuStreamDestroy_v2, (CUstream), s));
}

static void contexts(void)
{
    CUcontext made = NULL, now = NULL;
    CUdevice device = -1;
    unsigned flags = 99;
    int active = 9;
    mark();
    say("context", CALL(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice), &made, 0, 0));
    CALL(cuCtxGetCurrent, (CUcontext *), &now);
    say("made is current", now == made);
    say("context device", (CALL(cuCtxGetDevice, (CUdevice *), &device), device));
    say("context destroy", CALL(cuCtxDestroy_v2, (CUcontext), made));
    CALL(cuCtxGetCurrent, (CUcontext *), &now);
    say("current after destroy", now != NULL);
    used("after context: bytes");
    say("primary state", CALL(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *), 0, &flags, &active));
    say("primary active", active);
    say("context, device 99", CALL(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice), &made, 0, 99));
}

static CUresult end_capture(CUstream s, CUgraph *g)
{
    return CALL(cuStreamEndCapture, (CUstream, CUgraph *), s, g);
}
static CUresult begin(CUstream s, int mode)
{
    return CALL(cuStreamBeginCapture_v2, (CUstream, int), s, mode);
}
static CUresult instantiate(CUgraphExec *e, CUgraph g, unsigned long long flags)
{
    return CALL(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long), e, g, flags);
}
static CUresult graph_launch(CUgraphExec e, CUstream s)
{
    return CALL(cuGraphLaunch, (CUgraphExec, CUstream), e, s);
}
static long long graph_memory(int attribute)
{
    cuuint64_t v = 0;
    CALL(cuDeviceGetGraphMemAttribute, (CUdevice, int, void *), 0, attribute, &v);
    return (long long)v;
}

static void graph_memory_nodes(CUstream s)
{
    CUgraph g, clone;
    CUgraphExec e, second;
    CUgraphNode a, f, b;
    CUDA_MEM_ALLOC_NODE_PARAMS p = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
        .bytesize = 64 * MIB};
    mark();
    CALL(cuGraphCreate, (CUgraph *, unsigned), &g, 0);
    say("graph alloc",
        CALL(cuGraphAddMemAllocNode,
             (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *), &a, g, NULL, 0, &p));
    say("graph free", CALL(cuGraphAddMemFreeNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr),
                           &f, g, &a, 1, p.dptr));
    say("graph free twice",
        CALL(cuGraphAddMemFreeNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr), &b, g, &f, 1,
             p.dptr));
    p.bytesize = 32 * MIB;
    say("graph second alloc",
        CALL(cuGraphAddMemAllocNode,
             (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *), &b, g, &f, 1, &p));
    say("graph clone with memory", CALL(cuGraphClone, (CUgraph *, CUgraph), &clone, g));
    say("graph instantiate", instantiate(&e, g, 0));
    say("graph instantiate twice", instantiate(&second, g, 0));
    used("graph instantiated: bytes");
    say("free before launch", drop(p.dptr));
    say("graph launch", graph_launch(e, s));
    sync_context();
    used("graph launched: bytes");
    say("graph used", graph_memory(0));
    say("graph reserved", graph_memory(2));
    say("graph launch, not freed", graph_launch(e, s));
    say("graph memory free", free_async(p.dptr, s));
    sync_context();
    say("graph used after free", graph_memory(0));
    say("graph launch again", graph_launch(e, s));
    say("graph memory plain free", drop(p.dptr));
    say("graph trim", CALL(cuDeviceGraphMemTrim, (CUdevice), 0));
    say("graph reserved after trim", graph_memory(2));
    used("graph trimmed: bytes");
    say("destroy node with memory", CALL(cuGraphDestroyNode, (CUgraphNode), b));
    say("exec destroy", CALL(cuGraphExecDestroy, (CUgraphExec), e));
    say("graph destroy", CALL(cuGraphDestroy, (CUgraph), g));
}

static CUresult after(CUstream s, CUresult (*act)(CUstream), int mode, CUresult *ended)
{
    CUgraph g = NULL;
    begin(s, mode);
    CUresult result = act(s);
    *ended = end_capture(s, &g);
    if (g != NULL)
        CALL(cuGraphDestroy, (CUgraph), g);
    return result;
}

static CUresult act_sync(CUstream s)
{
    return CALL(cuStreamSynchronize, (CUstream), s);
}
static CUresult act_query(CUstream s)
{
    return CALL(cuStreamQuery, (CUstream), s);
}
static CUresult act_alloc(CUstream s)
{
    CUdeviceptr p;
    (void)s;
    return alloc(&p, 1);
}
static CUresult act_context(CUstream s)
{
    (void)s;
    return sync_context();
}
static CUresult act_begin(CUstream s)
{
    return begin(s, 0);
}
static CUevent g_event;
static CUresult act_event(CUstream s)
{
    CALL(cuEventRecord, (CUevent, CUstream), g_event, s);
    return CALL(cuEventQuery, (CUevent), g_event);
}
static CUresult act_event_sync(CUstream s)
{
    CALL(cuEventRecord, (CUevent, CUstream), g_event, s);
    return CALL(cuEventSynchronize, (CUevent), g_event);
}
static CUresult act_wait(CUstream s)
{
    CUevent other;
    CALL(cuEventCreate, (CUevent *, unsigned), &other, 0);
    CALL(cuEventRecord, (CUevent, CUstream), other, NULL);
    return CALL(cuStreamWaitEvent, (CUstream, CUevent, unsigned), s, other, 0);
}
static CUresult act_launch(CUstream s)
{
    return launch(s, 1, 32, 0);
}
static CUresult act_legacy(CUstream s)
{
    (void)s;
    return launch(NULL, 1, 32, 0);
}
static CUresult act_copy(CUstream s)
{
    static char byte;
    CUdeviceptr p;
    (void)s;
    if (alloc(&p, 1) != CUDA_SUCCESS)
        return 9999;
    return CALL(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t), &byte, p, 1);
}

static void spoilers(void)
{
    static const struct {
        const char *name;
        CUresult (*act)(CUstream);
        int mode;
        unsigned flags;
    } cases[] = {{"sync", act_sync, 0, 1},
                 {"query", act_query, 0, 1},
                 {"alloc, global", act_alloc, 0, 1},
                 {"alloc, relaxed", act_alloc, 2, 1},
                 {"context sync", act_context, 0, 1},
                 {"context sync, relaxed", act_context, 2, 1},
                 {"begin", act_begin, 0, 1},
                 {"event query", act_event, 0, 1},
                 {"event sync", act_event_sync, 0, 1},
                 {"wait for another", act_wait, 0, 1},
                 {"launch", act_launch, 0, 1},
                 {"legacy launch, blocking", act_legacy, 0, 0},
                 {"legacy launch, non-blocking", act_legacy, 0, 1},
                 {"legacy copy, relaxed, blocking", act_copy, 2, 0}};
    CALL(cuEventCreate, (CUevent *, unsigned), &g_event, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[96];
        CUstream s;
        CUresult ended;
        CALL(cuStreamCreate, (CUstream *, unsigned), &s, cases[i].flags);
        CUresult result = after(s, cases[i].act, cases[i].mode, &ended);
        snprintf(text, sizeof(text), "capture: %s", cases[i].name);
        say(text, result);
        snprintf(text, sizeof(text), "capture: %s, end", cases[i].name);
        say(text, ended);
        CALL(cuStreamDestroy_v2, (CUstream), s);
    }
    say("capture of the legacy stream", begin(NULL, 0));
    CUgraph g;
    CUstream s;
    CALL(cuStreamCreate, (CUstream *, unsigned), &s, 1);
    say("end without begin", end_capture(s, &g));
}

static void captured(CUstream s)
{
    CUgraph g = NULL;
    CUgraphExec e;
    CUdeviceptr p, x;
    CUstream other;
    CUevent fork, join;
    CUgraphNode nodes[16];
    size_t count = 16, edges = 0;
    char back = 0;
    alloc(&x, 4096);
    CALL(cuStreamCreate, (CUstream *, unsigned), &other, 1);
    CALL(cuEventCreate, (CUevent *, unsigned), &fork, 2);
    CALL(cuEventCreate, (CUevent *, unsigned), &join, 2);
    begin(s, 0);
    say("captured alloc", alloc_async(&p, 4 * MIB, s));
    say("captured set", CALL(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream), p, 7, 4096, s));
    CALL(cuEventRecord, (CUevent, CUstream), fork, s);
    say("captured fork", CALL(cuStreamWaitEvent, (CUstream, CUevent, unsigned), other, fork, 0));
    say("captured launch", launch(other, 1, 32, 0));
    say("captured copy", CALL(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream), x, p, 4096, s));
    CALL(cuEventRecord, (CUevent, CUstream), join, other);
    say("captured join", CALL(cuStreamWaitEvent, (CUstream, CUevent, unsigned), s, join, 0));
    say("captured free", free_async(p, s));
    say("captured end", end_capture(s, &g));
    CALL(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *), g, nodes, &count);
    CALL(cuGraphGetEdges, (CUgraph, CUgraphNode *, CUgraphNode *, size_t *), g, NULL, NULL, &edges);
    say("captured nodes", (long long)count);
    say("captured edges", (long long)edges);
    say("captured instantiate", instantiate(&e, g, 0));
    say("captured run", graph_launch(e, s));
    sync_context();
    CALL(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t), &back, x + 4095, 1);
    say("captured result", back);
    begin(s, 0);
    CALL(cuEventRecord, (CUevent, CUstream), fork, s);
    CALL(cuStreamWaitEvent, (CUstream, CUevent, unsigned), other, fork, 0);
    launch(other, 1, 32, 0);
    say("end of another stream", end_capture(other, &g));
    say("unjoined end", end_capture(s, &g));
}

static void procaddr(void)
{
    static const struct {
        const char *name;
        int version;
        cuuint64_t flags;
    } cases[] = {{"cuMemAlloc", 12000, 0},
                 {"cuMemAlloc", 2000, 0},
                 {"cuNothing", 12000, 0},
                 {"cuGraphLaunch", 12000, 2},
                 {"cuGraphAddKernelNode", 11000, 0},
                 {"cuLaunchKernel", 12000, 3}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[96];
        void *f = NULL;
        int status = -1;
        CUresult r = CALL(cuGetProcAddress_v2, (const char *, void **, int, cuuint64_t, int *), cases[i].name, &f,
                          cases[i].version, cases[i].flags, &status);
        snprintf(text, sizeof(text), "procaddr %s %d %d", cases[i].name, cases[i].version, (int)cases[i].flags);
        say(text, r * 100 + (r == CUDA_SUCCESS ? status * 10 : 0) + (f != NULL));
    }
}

int main(void)
{
    CUcontext ctx;
    CUstream s;
    CUdeviceptr p;
    int count;
    g_driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (g_driver == NULL)
        return 2;
    signal(SIGSEGV, crashed);
    signal(SIGBUS, crashed);
    printf("{");
    say("before init", CALL(cuDeviceGetCount, (int *), &count));
    say("init, flags 1", CALL(cuInit, (unsigned), 1));
    say("init", CALL(cuInit, (unsigned), 0));
    say("without context", alloc(&p, 1));
    say("primary", CALL(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), &ctx, 0));
    say("current", CALL(cuCtxSetCurrent, (CUcontext), ctx));
    CALL(cuStreamCreate, (CUstream *, unsigned), &s, CU_STREAM_NON_BLOCKING);
    plain();
    pitched_and_arrays();
    managed_and_host();
    mapped();
    modules();
    pools();
    streams();
    contexts();
    graph_memory_nodes(s);
    captured(s);
    spoilers();
    procaddr();
    captures(ctx);
    objects(ctx);
    say("primary release", CALL(cuDevicePrimaryCtxRelease_v2, (CUdevice), 0));
    say("after release", alloc(&p, 1));
    printf("\n}\n");
    return 0;
}

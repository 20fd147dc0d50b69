/*
 * vgpu-spin: keeps a device busy with kernels of a known amount of work, and reports how much was done when. Work is
 * measured in loop iterations, not in time: a kernel that shares the device takes longer, as real ones do. The kernels
 * count themselves in host memory. A driver that only simulates kernels leaves this count at zero; then launches are
 * counted. The output is one JSON object per line.
 */
#include <dlfcn.h>
#include <getopt.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "check.h"
#include "limiter.h"
#include "objects.h"

#define SPIN_SYMBOLS(X)             \
    X(cuInit)                       \
    X(cuDeviceGet)                  \
    X(cuDevicePrimaryCtxRetain)     \
    X(cuCtxSetCurrent)              \
    X(cuCtxSynchronize)             \
    X(cuModuleLoadData)             \
    X(cuModuleGetFunction)          \
    X(cuMemHostAlloc)               \
    X(cuMemHostGetDevicePointer_v2) \
    X(cuMemAlloc_v2)                \
    X(cuMemsetD8_v2)                \
    X(cuStreamCreate)               \
    X(cuStreamSynchronize)          \
    X(cuEventCreate)                \
    X(cuEventRecord) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuLaunchKernel) X(cuDeviceGetAttribute)
#define SPIN_OPTIONAL(X)           \
    X(cuLaunchCooperativeKernel)   \
    X(cuLaunchKernelEx)            \
    X(cuStreamBeginCapture_v2)     \
    X(cuStreamEndCapture)          \
    X(cuGraphInstantiateWithFlags) \
    X(cuGraphLaunch)               \
    X(cuDeviceGetDevResource)      \
    X(cuDevSmResourceSplitByCount) \
    X(cuDevResourceGenerateDesc)   \
    X(cuGreenCtxCreate) X(cuGreenCtxStreamCreate) X(cuLaunchHostFunc) X(cuLaunchCooperativeKernelMultiDevice)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SPIN_SYMBOLS(MEMBER) SPIN_OPTIONAL(MEMBER)
} cu;

enum {
    STREAMS = 4,
    GREENS = 2,
    GRAPH_KERNELS = 40,
    BLOCK = 256,
    CLUSTER = 2,
    COUNTERS_BYTES = 1 << 16, /* 64 bytes of counters, then 8 bytes for each block of a grid that meets */
    IN_FLIGHT_US = 20000,
    CHUNKS = 4,
    DEPTH_MOST = 64,
    COST_BLOCK = 50,
    COST_CLOCK_NS = 100000000
};

static struct {
    double kernel_us, rate, seconds, report_ms, every_us, linger_ms;
    uint64_t begin_at;
    int device, burst, depth;
    const char *mode;
    bool calibrate, cost;
} want = {.kernel_us = 50, .rate = 400, .seconds = 2, .report_ms = 250, .burst = 1, .mode = "eager"};

static struct {
    CUfunction kernel;
    CUstream streams[STREAMS];
    CUgraphExec graph;
    uint64_t iterations;
    CUdeviceptr counter, host_device;
    volatile uint64_t *host; /* number of finished kernels; least number of blocks that passed a barrier early */
    unsigned grid;
    uint64_t launched; /* number of kernels launched */
} run;

static const char ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u64 iterations, .param .u64 counter, .param .u64 host)\n{\n"
    " .reg .pred %p, %q;\n .reg .u64 %n, %c, %h, %v;\n .reg .f32 %f;\n .reg .u32 %t, %b;\n"
    " ld.param.u64 %n, [iterations];\n ld.param.u64 %c, [counter];\n ld.param.u64 %h, [host];\n"
    " mov.u32 %t, %tid.x;\n mov.u32 %b, %ctaid.x;\n cvt.rn.f32.u32 %f, %t;\n"
    "again:\n fma.rn.f32 %f, %f, 0f3F7FFFFF, 0f3F800001;\n sub.u64 %n, %n, 1;\n setp.gt.s64 %p, %n, 0;\n @%p bra again;\n"
    " setp.eq.f32 %q, %f, 0f7F7FFFFF;\n @%q st.global.f32 [%c+8], %f;\n"
    " or.b32 %t, %t, %b;\n setp.ne.u32 %p, %t, 0;\n @%p bra done;\n"
    " atom.global.add.u64 %v, [%c], 1;\n add.u64 %v, %v, 1;\n st.volatile.global.u64 [%h], %v;\n"
    "done:\n ret;\n}\n"
    /*
     * The same work in eight rounds. After each round all blocks of the grid meet at a barrier, which a block passes
     * when it sees that all others have arrived. A block then checks that its neighbour has written the round's number.
     */
    ".visible .entry meet(.param .u64 iterations, .param .u64 counter, .param .u64 host)\n{\n"
    " .reg .pred %p, %q;\n .reg .u64 %n, %m, %c, %h, %v, %w, %a, %g, %round, %target;\n .reg .f32 %f;\n"
    " .reg .u32 %t, %b, %r, %s;\n"
    " ld.param.u64 %n, [iterations];\n ld.param.u64 %c, [counter];\n ld.param.u64 %h, [host];\n"
    " mov.u32 %t, %tid.x;\n mov.u32 %b, %ctaid.x;\n mov.u32 %s, %nctaid.x;\n cvt.rn.f32.u32 %f, %t;\n"
    " cvt.u64.u32 %g, %s;\n shr.u64 %n, %n, 3;\n mov.u32 %r, 0;\n"
    " ld.volatile.global.u64 %round, [%c];\n shl.b64 %round, %round, 3;\n"
    "round:\n mov.u64 %m, %n;\n add.u64 %round, %round, 1;\n"
    "again:\n fma.rn.f32 %f, %f, 0f3F7FFFFF, 0f3F800001;\n sub.u64 %m, %m, 1;\n setp.gt.s64 %p, %m, 0;\n @%p bra again;\n"
    " setp.eq.f32 %q, %f, 0f7F7FFFFF;\n @%q st.global.f32 [%c+8], %f;\n"
    " bar.sync 0;\n setp.ne.u32 %p, %t, 0;\n @%p bra met;\n"
    " mul.wide.u32 %a, %b, 8;\n add.u64 %a, %a, %c;\n st.volatile.global.u64 [%a+64], %round;\n membar.gl;\n"
    " atom.global.add.u64 %v, [%c+16], 1;\n div.u64 %target, %v, %g;\n mad.lo.u64 %target, %target, %g, %g;\n"
    "wait:\n ld.volatile.global.u64 %v, [%c+16];\n setp.lt.u64 %q, %v, %target;\n @%q bra wait;\n membar.gl;\n"
    " add.u32 %s, %b, 1;\n cvt.u64.u32 %v, %s;\n rem.u64 %v, %v, %g;\n shl.b64 %v, %v, 3;\n add.u64 %a, %c, %v;\n"
    " ld.volatile.global.u64 %w, [%a+64];\n sub.u64 %w, %w, %round;\n setp.le.u64 %q, %w, 1;\n @%q bra met;\n"
    " atom.global.add.u64 %v, [%c+24], 1;\n add.u64 %v, %v, 1;\n st.volatile.global.u64 [%h+8], %v;\n"
    "met:\n bar.sync 0;\n add.u32 %r, %r, 1;\n setp.lt.u32 %q, %r, 8;\n @%q bra round;\n"
    " or.b32 %t, %t, %b;\n setp.ne.u32 %p, %t, 0;\n @%p bra done;\n"
    " atom.global.add.u64 %v, [%c], 1;\n add.u64 %v, %v, 1;\n st.volatile.global.u64 [%h], %v;\n"
    "done:\n ret;\n}\n";

static const char usage[] =
    "usage: vgpu-spin --kernel-us D [OPTIONS] | --calibrate | --cost\n"
    "Keeps a device busy with kernels of a known amount of work; prints one JSON object a line.\n\n"
    "  --kernel-us D   microseconds of work in a kernel (default 50)\n"
    "  --seconds S     how long (default 2)\n"
    "  --mode MODE     eager (default), graph (40 kernels each), cooperative (all blocks meet at eight barriers),\n"
    "                  cluster (the same by cuLaunchKernelEx, in clusters of two blocks), streams (4), callbacks (a\n"
    "                  host function behind each kernel), multi (one cooperative launch on this device and the\n"
    "                  next), both (one launch on each of them), green (two green contexts, a stream each)\n"
    "  --every-us P --burst K\n"
    "                  a latency-sensitive client: K kernels every P microseconds, timed\n"
    "  --rate R        loop iterations in a microsecond, from --calibrate on the idle device (default 400)\n"
    "  --depth N       at most N submissions in flight on the first stream; default some 20 ms of work\n"
    "  --report-ms W   a line each W milliseconds (default 250)\n"
    "  --begin-at NS   begin at this time of CLOCK_MONOTONIC\n"
    "  --linger-ms L   keep the context for so long afterwards\n"
    "  --device N      the CUDA device (default 0)\n"
    "  --calibrate     measure R\n"
    "  --cost          cuLaunchKernel through the process's symbol and the driver's own\n"
    "  --help          this text\n";

#define DO(call) check(cu.call, #call)

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        fprintf(stderr, "vgpu-spin: %s\n", dlerror());
        exit(3);
    }
#define NEEDED(name)                                           \
    if ((*(void **)&cu.name = dlsym(handle, #name)) == NULL) { \
        fprintf(stderr, "vgpu-spin: no %s\n", #name);          \
        exit(3);                                               \
    }
#define MAYBE(name) *(void **)&cu.name = dlsym(handle, #name);
    SPIN_SYMBOLS(NEEDED)
    SPIN_OPTIONAL(MAYBE)
}

static void CUDA_CB called_back(void *unused)
{
    (void)unused;
}

/* Context on the next device. Its kernels count in separate memory. */
static struct {
    CUcontext first; /* context on this device */
    CUcontext context;
    CUfunction kernel;
    CUstream stream;
    CUdeviceptr counter;
} beside;

static void open_next_device(CUcontext first)
{
    CUdevice device;
    CUmodule module;
    beside.first = first;
    DO(cuDeviceGet(&device, want.device + 1));
    DO(cuDevicePrimaryCtxRetain(&beside.context, device));
    DO(cuCtxSetCurrent(beside.context));
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&beside.kernel, module, "spin"));
    DO(cuMemAlloc_v2(&beside.counter, 64));
    DO(cuMemsetD8_v2(beside.counter, 0, 64));
    DO(cuStreamCreate(&beside.stream, CU_STREAM_NON_BLOCKING));
    DO(cuCtxSetCurrent(first));
}

static void launch_on_both(CUstream stream, void **parameters)
{
    void *others[] = {&run.iterations, &beside.counter, &beside.counter};
    CUDA_LAUNCH_PARAMS list[] = {{run.kernel, run.grid, 1, 1, BLOCK, 1, 1, 0, stream, parameters},
                                 {beside.kernel, run.grid, 1, 1, BLOCK, 1, 1, 0, beside.stream, others}};
    DO(cuLaunchCooperativeKernelMultiDevice(list, 2, 0));
}

static void launch_beside(void)
{
    void *parameters[] = {&run.iterations, &beside.counter, &beside.counter};
    DO(cuCtxSetCurrent(beside.context));
    DO(cuLaunchKernel(beside.kernel, run.grid, 1, 1, BLOCK, 1, 1, 0, beside.stream, parameters, NULL));
    DO(cuCtxSetCurrent(beside.first));
}

/* Launches the kernel whose blocks meet, with cuLaunchKernelEx and in clusters. */
static void launch_clusters(CUstream stream, void **parameters)
{
    CUlaunchAttribute how[] = {
        {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1},
        {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {CLUSTER, 1, 1}},
    };
    CUlaunchConfig config = {run.grid, 1, 1, BLOCK, 1, 1, 0, stream, how, sizeof(how) / sizeof(how[0])};
    DO(cuLaunchKernelEx(&config, run.kernel, parameters, NULL));
}

static void launch(CUstream stream)
{
    void *parameters[] = {&run.iterations, &run.counter, &run.host_device};
    if (strcmp(want.mode, "multi") == 0)
        launch_on_both(stream, parameters);
    else if (strcmp(want.mode, "cluster") == 0)
        launch_clusters(stream, parameters);
    else if (strcmp(want.mode, "cooperative") == 0)
        DO(cuLaunchCooperativeKernel(run.kernel, run.grid, 1, 1, BLOCK, 1, 1, 0, stream, parameters));
    else
        DO(cuLaunchKernel(run.kernel, run.grid, 1, 1, BLOCK, 1, 1, 0, stream, parameters, NULL));
    if (strcmp(want.mode, "both") == 0)
        launch_beside();
    if (strcmp(want.mode, "callbacks") == 0)
        DO(cuLaunchHostFunc(stream, called_back, NULL));
}

/* Divides the device's SMs into two halves, and makes a green context and a stream on each. */
static void make_green(CUdevice device)
{
    CUdevResource whole;
    CUdevResource half[GREENS];
    unsigned count = GREENS;
    DO(cuDeviceGetDevResource(device, &whole, CU_DEV_RESOURCE_TYPE_SM));
    DO(cuDevSmResourceSplitByCount(half, &count, &whole, NULL, 0, whole.sm.smCount / GREENS / 8 * 8));
    for (unsigned i = 0; i < count; i++) {
        CUdevResourceDesc desc;
        CUgreenCtx green;
        DO(cuDevResourceGenerateDesc(&desc, &half[i], 1));
        DO(cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
        DO(cuGreenCtxStreamCreate(&run.streams[i], green, CU_STREAM_NON_BLOCKING, 0));
    }
}

static void open_device(void)
{
    CUcontext context;
    CUdevice device;
    CUmodule module;
    int sms = 1;
    void *host;
    DO(cuInit(0));
    DO(cuDeviceGet(&device, want.device));
    DO(cuDevicePrimaryCtxRetain(&context, device));
    DO(cuCtxSetCurrent(context));
    DO(cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    DO(cuModuleLoadData(&module, ptx));
    bool meets = strcmp(want.mode, "cooperative") == 0 || strcmp(want.mode, "cluster") == 0;
    DO(cuModuleGetFunction(&run.kernel, module, meets ? "meet" : "spin"));
    DO(cuMemAlloc_v2(&run.counter, COUNTERS_BYTES));
    DO(cuMemsetD8_v2(run.counter, 0, COUNTERS_BYTES));
    DO(cuMemHostAlloc(&host, 64, CU_MEMHOSTALLOC_DEVICEMAP));
    memset(host, 0, 64);
    run.host = host;
    DO(cuMemHostGetDevicePointer_v2(&run.host_device, host, 0));
    for (int i = 0; i < STREAMS; i++)
        DO(cuStreamCreate(&run.streams[i], CU_STREAM_NON_BLOCKING));
    if (strcmp(want.mode, "green") == 0)
        make_green(device);
    if (strcmp(want.mode, "multi") == 0 || strcmp(want.mode, "both") == 0)
        open_next_device(context);
    run.grid = (unsigned)sms * 8; /* eight blocks of 256 threads fill an SM of 2048 threads */
    run.iterations = (uint64_t)(want.kernel_us * want.rate);
    run.iterations = run.iterations > 0 ? run.iterations : 1;
}

static void make_graph(void)
{
    CUgraph graph;
    DO(cuStreamBeginCapture_v2(run.streams[0], CU_STREAM_CAPTURE_MODE_GLOBAL));
    for (int i = 0; i < GRAPH_KERNELS; i++)
        launch(run.streams[0]);
    DO(cuStreamEndCapture(run.streams[0], &graph));
    DO(cuGraphInstantiateWithFlags(&run.graph, graph, 0));
}

/* Makes one submission. Returns for how many kernels it stands. */
static unsigned submit(CUstream stream)
{
    if (run.graph != NULL)
        DO(cuGraphLaunch(run.graph, stream));
    else
        launch(stream);
    unsigned kernels = run.graph != NULL ? GRAPH_KERNELS : 1;
    __atomic_fetch_add(&run.launched, kernels, __ATOMIC_RELAXED);
    return kernels;
}

static uint64_t done(void)
{
    uint64_t counted = *run.host;
    return counted > 0 ? counted : __atomic_load_n(&run.launched, __ATOMIC_RELAXED);
}

static void sleep_until(uint64_t at)
{
    struct timespec when = {.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) != 0)
        continue;
}

/*
 * The numbers of finished kernels at the end of each window. A thread notes them, even if the launching thread is
 * blocked.
 */
static struct {
    uint64_t start, window;
    unsigned count;
    struct {
        uint64_t at, done;
    } marks[4096];
    uint64_t end, end_done; /* end of the requested duration, and the number of kernels finished until then */
} report;

static void *report_windows(void *unused)
{
    (void)unused;
    uint64_t end = report.end;
    for (uint64_t at; (at = report.start + (report.count + 1) * report.window) <= end;) {
        sleep_until(at);
        if (report.count == sizeof(report.marks) / sizeof(report.marks[0]))
            break;
        report.marks[report.count].at = now_ns();
        report.marks[report.count++].done = done();
    }
    sleep_until(end);
    report.end = now_ns();
    report.end_done = done();
    return NULL;
}

static void begin(void)
{
    DO(cuCtxSynchronize());
    if (want.begin_at > now_ns())
        sleep_until(want.begin_at);
}

/* Limits the work in flight: at most `chunks` events, each after `chunk` submissions. */
struct flight {
    unsigned chunks, chunk;
    CUevent ring[DEPTH_MOST];
};

static void make_flight(struct flight *flight)
{
    double each_us = want.kernel_us * (run.graph != NULL ? GRAPH_KERNELS : 1);
    flight->chunks = want.depth > 0 ? (unsigned)want.depth : CHUNKS;
    flight->chunk = want.depth > 0 ? 1 : (unsigned)(IN_FLIGHT_US / each_us / CHUNKS) + 1;
    for (unsigned i = 0; i < flight->chunks; i++)
        DO(cuEventCreate(&flight->ring[i], CU_EVENT_DISABLE_TIMING));
}

/* Submits work without pause until `end`. */
static void submit_until(uint64_t end, struct flight *flight)
{
    unsigned streams = strcmp(want.mode, "streams") == 0 ? STREAMS : strcmp(want.mode, "green") == 0 ? GREENS : 1;
    for (uint64_t i = 0; now_ns() < end; i++) {
        CUevent behind = flight->ring[i / flight->chunk % flight->chunks];
        if (i % flight->chunk == 0 && i / flight->chunk >= flight->chunks)
            DO(cuEventSynchronize(behind));
        for (unsigned s = 0; s < streams; s++)
            submit(run.streams[s]);
        if ((i + 1) % flight->chunk == 0)
            DO(cuEventRecord(behind, run.streams[0]));
    }
    DO(cuCtxSynchronize());
}

/* Keeps the device busy, and reports what was done in each window. */
static int saturate(void)
{
    struct flight flight;
    make_flight(&flight);
    begin();
    uint64_t start = now_ns();
    uint64_t end = start + (uint64_t)(want.seconds * 1e9);
    pthread_t reporter;
    report.start = start;
    report.window = (uint64_t)(want.report_ms * 1e6);
    report.end = end;
    pthread_create(&reporter, NULL, report_windows, NULL);
    uint64_t first = done();
    printf("{\"state\": \"spun\", \"libvgpu\": %s, \"start_ns\": %llu, \"window_ms\": %g, \"windows\": [",
           limiter_loaded() ? "true" : "false", (unsigned long long)start, want.report_ms);
    submit_until(end, &flight);
    pthread_join(reporter, NULL);
    uint64_t last = report.end_done;
    double seconds = (double)(report.end - start) / 1e9;
    for (unsigned i = 0; i < report.count; i++)
        printf("%s[%.3f, %llu]", i > 0 ? ", " : "", (double)(report.marks[i].at - start) / 1e6,
               (unsigned long long)report.marks[i].done);
    printf("], \"kernels\": %llu, \"seconds\": %.6f, \"per_second\": %.3f, \"wrong\": %llu}\n",
           (unsigned long long)(last - first), seconds, (double)(last - first) / seconds,
           (unsigned long long)run.host[1]);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int latency(void)
{
    size_t most = (size_t)(want.seconds * 1e6 / want.every_us) + 2;
    size_t count = 0;
    double *times = calloc(most, sizeof(*times));
    begin();
    uint64_t start = now_ns();
    for (uint64_t at = start; at < start + (uint64_t)(want.seconds * 1e9) && count < most; count++) {
        uint64_t before = now_ns();
        for (int i = 0; i < want.burst; i++)
            submit(run.streams[0]);
        DO(cuStreamSynchronize(run.streams[0]));
        times[count] = (double)(now_ns() - before) / 1e3;
        at += (uint64_t)(want.every_us * 1e3);
        if (at > now_ns())
            sleep_until(at);
    }
    qsort(times, count, sizeof(*times), by_value);
    printf(
        "{\"state\": \"latency\", \"libvgpu\": %s, \"count\": %zu, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f}\n",
        limiter_loaded() ? "true" : "false", count, times[count / 2], times[count * 99 / 100], times[count - 1]);
    free(times);
    return 0;
}

static int calibrate(void)
{
    CUevent from, to;
    float ms = 0;
    float best = 1e9f;
    run.iterations = 2000000;
    DO(cuEventCreate(&from, 0));
    DO(cuEventCreate(&to, 0));
    for (int i = 0; i < 8; i++) {
        DO(cuEventRecord(from, run.streams[0]));
        launch(run.streams[0]);
        DO(cuEventRecord(to, run.streams[0]));
        DO(cuEventSynchronize(to));
        DO(cuEventElapsedTime(&ms, from, to));
        best = ms < best ? ms : best;
    }
    printf("{\"state\": \"calibrated\", \"rate\": %.3f}\n", (double)run.iterations / ((double)best * 1e3));
    return 0;
}

static int find_driver(const struct vgpu_object *object, void *found)
{
    void *symbol = vgpu_object_symbol(object, "cuLaunchKernel");
    if (symbol != NULL && (void *)cu.cuLaunchKernel != symbol)
        *(void **)found = symbol; /* the last definition in load order is the driver's, because libvgpu comes first */
    return 0;
}

/* Reads the processor's cycle counter after all earlier instructions, or the clock on other processors than x86-64. */
static uint64_t ticks(void)
{
#ifdef __x86_64__
    unsigned processor;
    uint64_t at = __builtin_ia32_rdtscp(&processor);
    __builtin_ia32_lfence();
    return at;
#else
    return now_ns();
#endif
}

static double ticks_per_ns(void)
{
    uint64_t began = now_ns();
    uint64_t from = ticks();
    while (now_ns() - began < COST_CLOCK_NS)
        continue;
    return (double)(ticks() - from) / (double)(now_ns() - began);
}

static int by_ticks(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void stay_on_this_processor(void)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((unsigned)sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);
}

/*
 * Measures single launches with and without the hook, in turn, in one process and on one processor: two processes
 * differ by more than the cost of a hook.
 */
static int cost(void)
{
    enum { WAYS = 2, EACH = 1000000 };
    static uint32_t took[WAYS][EACH];
    void *parameters[] = {&run.iterations, &run.counter, &run.host_device};
    __typeof__(&cuLaunchKernel) ways[WAYS] = {cu.cuLaunchKernel, NULL};
    vgpu_objects_walk(find_driver, &ways[1]);
    if (ways[1] == NULL)
        /* without libvgpu both measurements use the same function: their difference is the noise of the method */
        ways[1] = cu.cuLaunchKernel;
    run.iterations = 1;
    stay_on_this_processor();
    double rate = ticks_per_ns();
    for (uint32_t i = 0; i < EACH; i++) {
        for (uint32_t turn = 0; turn < WAYS; turn++) {
            /* the ways change places, because the first call of a pair is slower than the second: by 7 ns on an H100 */
            uint32_t way = (i + turn) % WAYS;
            uint64_t before = ticks();
            CUresult result = ways[way](run.kernel, 1, 1, 1, 32, 1, 1, 0, run.streams[0], parameters, NULL);
            took[way][i] = (uint32_t)(ticks() - before);
            check(result, "cuLaunchKernel");
        }
        if (i % COST_BLOCK == 0)
            DO(cuStreamSynchronize(run.streams[0]));
    }
    for (uint32_t way = 0; way < WAYS; way++)
        qsort(took[way], EACH, sizeof(uint32_t), by_ticks);
    printf("{\"state\": \"cost\", \"libvgpu\": %s, \"interposed\": %s, \"ours_median_ns\": %.2f, "
           "\"driver_median_ns\": %.2f}\n",
           limiter_loaded() ? "true" : "false", ways[1] != cu.cuLaunchKernel ? "true" : "false",
           took[0][EACH / 2] / rate, took[1][EACH / 2] / rate);
    return 0;
}

static bool parse(int argc, char **argv)
{
    static const struct option names[] = {{"kernel-us", 1, NULL, 'k'}, {"rate", 1, NULL, 'r'},
                                          {"mode", 1, NULL, 'm'},      {"seconds", 1, NULL, 's'},
                                          {"report-ms", 1, NULL, 'w'}, {"begin-at", 1, NULL, 'b'},
                                          {"device", 1, NULL, 'd'},    {"every-us", 1, NULL, 'e'},
                                          {"burst", 1, NULL, 'n'},     {"depth", 1, NULL, 'f'},
                                          {"calibrate", 0, NULL, 'c'}, {"cost", 0, NULL, 'x'},
                                          {"linger-ms", 1, NULL, 'l'}, {0}};
    for (int name; (name = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (name) {
        case 'k':
            want.kernel_us = strtod(optarg, NULL);
            break;
        case 'r':
            want.rate = strtod(optarg, NULL);
            break;
        case 'm':
            want.mode = optarg;
            break;
        case 's':
            want.seconds = strtod(optarg, NULL);
            break;
        case 'w':
            want.report_ms = strtod(optarg, NULL);
            break;
        case 'b':
            want.begin_at = strtoull(optarg, NULL, 10);
            break;
        case 'd':
            want.device = atoi(optarg);
            break;
        case 'e':
            want.every_us = strtod(optarg, NULL);
            break;
        case 'n':
            want.burst = atoi(optarg);
            break;
        case 'f':
            want.depth = atoi(optarg);
            break;
        case 'l':
            want.linger_ms = strtod(optarg, NULL);
            break;
        case 'c':
            want.calibrate = true;
            break;
        case 'x':
            want.cost = true;
            break;
        default:
            return false;
        }
    return want.kernel_us > 0 && want.rate > 0 && want.report_ms > 0 && want.burst > 0 && want.depth >= 0 &&
           want.depth <= DEPTH_MOST && optind == argc;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(usage, stdout);
        return 0;
    }
    if (!parse(argc, argv)) {
        fputs(usage, stderr);
        return 2;
    }
    load();
    open_device();
    if (want.calibrate)
        return calibrate();
    if (want.cost)
        return cost();
    if (strcmp(want.mode, "graph") == 0)
        make_graph();
    int status = want.every_us > 0 ? latency() : saturate();
    fflush(stdout);
    /* keeps the context for --linger-ms: its end would disturb measurements of other processes */
    usleep((useconds_t)(want.linger_ms * 1000));
    return status;
}

/*
 * context_cycles.c: contexts that begin and end, or many at the same time, with work in each.
 *
 *   context_cycles calibrate                        loop iterations in a microsecond, alone on the device
 *   context_cycles HOW COUNT SECONDS KERNEL_US ITERATIONS
 *     HOW: reset, release (the primary context), destroy (one of cuCtxCreate), green (of a green context):
 *          COUNT times make it, load, launch, end it; live: COUNT contexts of cuCtxCreate beside each other, a launch to
 *          each, then all work in the last
 * Prints one JSON object with the part of the time in which kernels ran: kernels * KERNEL_US / elapsed.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define SYMBOLS(X)                  \
    X(cuInit)                       \
    X(cuDeviceGet)                  \
    X(cuDevicePrimaryCtxRetain)     \
    X(cuDevicePrimaryCtxRelease_v2) \
    X(cuDevicePrimaryCtxReset_v2)   \
    X(cuCtxCreate_v2)               \
    X(cuCtxDestroy_v2)              \
    X(cuCtxSetCurrent)              \
    X(cuCtxSynchronize)             \
    X(cuModuleLoadData)             \
    X(cuModuleGetFunction)          \
    X(cuLaunchKernel)               \
    X(cuDeviceGetDevResource)       \
    X(cuDevSmResourceSplitByCount)  \
    X(cuDevResourceGenerateDesc) X(cuGreenCtxCreate) X(cuGreenCtxDestroy) X(cuCtxFromGreenCtx)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SYMBOLS(MEMBER)
} cu;

enum { LIVE_MAX = 64, IN_FLIGHT_US = 4000 };

static const char ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u64 iterations)\n{\n"
    " .reg .pred %p, %q;\n .reg .u64 %n, %at;\n .reg .f32 %f;\n"
    " ld.param.u64 %n, [iterations];\n mov.f32 %f, 0f3F800000;\n"
    "again:\n fma.rn.f32 %f, %f, 0f3F7FFFFF, 0f3F800001;\n sub.u64 %n, %n, 1;\n"
    " setp.gt.s64 %p, %n, 0;\n @%p bra again;\n"
    /* this comparison is never true, but the compiler cannot know this, and keeps the loop */
    " setp.eq.f32 %q, %f, 0f7F7FFFFF;\n mov.u64 %at, 0;\n @%q st.global.f32 [%at], %f;\n ret;\n}\n";

static uint64_t iterations;
static uint64_t launched;
static double kernel_us;
static CUdevice device;

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void check(CUresult result, const char *call)
{
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "context_cycles: %s: %d after %llu kernels\n", call, (int)result, (unsigned long long)launched);
    exit(1);
}
#define DO(call) check(cu.call, #call)

static void load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define FIND(name)                                                             \
    if (handle == NULL || (*(void **)&cu.name = dlsym(handle, #name)) == NULL) \
        check(CUDA_ERROR_NOT_FOUND, #name);
    SYMBOLS(FIND)
    DO(cuInit(0));
    DO(cuDeviceGet(&device, 0));
}

static CUfunction function_here(void)
{
    CUmodule module;
    CUfunction function;
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&function, module, "spin"));
    return function;
}

static void launch(CUfunction function)
{
    void *parameters[] = {&iterations};
    DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
    launched++;
}

/* Works in the current context for `us` microseconds. Synchronises the device every IN_FLIGHT_US. */
static void work(double us)
{
    CUfunction function = function_here();
    uint64_t each = (uint64_t)(IN_FLIGHT_US / kernel_us) + 1;
    double until = now_us() + us;
    do {
        for (uint64_t i = 0; i < each; i++)
            launch(function);
        DO(cuCtxSynchronize());
    } while (now_us() < until);
}

static CUgreenCtx make_green(void)
{
    CUdevResource all;
    CUdevResource group;
    CUdevResourceDesc desc;
    CUgreenCtx green;
    CUcontext context;
    unsigned int groups = 1;
    DO(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
    DO(cuDevSmResourceSplitByCount(&group, &groups, &all, NULL, 0, 16));
    DO(cuDevResourceGenerateDesc(&desc, &group, 1));
    DO(cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
    DO(cuCtxFromGreenCtx(&context, green));
    DO(cuCtxSetCurrent(context));
    return green;
}

static void cycle(const char *how, double us)
{
    CUcontext context = NULL;
    CUgreenCtx green = NULL;
    if (strcmp(how, "destroy") == 0) {
        DO(cuCtxCreate_v2(&context, 0, device));
    } else if (strcmp(how, "green") == 0) {
        green = make_green();
    } else {
        DO(cuDevicePrimaryCtxRetain(&context, device));
        DO(cuCtxSetCurrent(context));
    }
    work(us);
    if (strcmp(how, "destroy") == 0)
        DO(cuCtxDestroy_v2(context));
    else if (green != NULL)
        DO(cuGreenCtxDestroy(green));
    else if (strcmp(how, "reset") == 0)
        DO(cuDevicePrimaryCtxReset_v2(device));
    else
        DO(cuDevicePrimaryCtxRelease_v2(device));
}

/* Returns the microseconds of the work alone, without making the contexts. */
static double live(unsigned count, double us)
{
    static CUcontext contexts[LIVE_MAX];
    static CUfunction functions[LIVE_MAX];
    count = count < LIVE_MAX ? count : LIVE_MAX;
    for (unsigned i = 0; i < count; i++) {
        DO(cuCtxCreate_v2(&contexts[i], 0, device));
        functions[i] = function_here();
    }
    for (unsigned i = 0; i < count; i++) {
        DO(cuCtxSetCurrent(contexts[i]));
        launch(functions[i]);
        DO(cuCtxSynchronize());
    }
    launched = 0;
    double began = now_us();
    work(us);
    return now_us() - began;
}

static void calibrate(void)
{
    CUcontext context;
    double began = 0;
    DO(cuDevicePrimaryCtxRetain(&context, device));
    DO(cuCtxSetCurrent(context));
    CUfunction function = function_here();
    iterations = 20000000;
    for (int i = 0; i < 3; i++) {
        began = now_us();
        launch(function);
        DO(cuCtxSynchronize());
    }
    printf("%.1f\n", (double)iterations / (now_us() - began));
}

int main(int argc, char **argv)
{
    load();
    if (argc == 2 && strcmp(argv[1], "calibrate") == 0) {
        calibrate();
        return 0;
    }
    if (argc != 6) {
        fprintf(stderr, "usage: context_cycles HOW COUNT SECONDS KERNEL_US ITERATIONS\n");
        return 2;
    }
    unsigned count = (unsigned)atoi(argv[2]);
    double us = atof(argv[3]) * 1e6;
    kernel_us = atof(argv[4]);
    iterations = strtoull(argv[5], NULL, 10);
    double began = now_us();
    bool is_live = strcmp(argv[1], "live") == 0;
    double elapsed = is_live ? live(count, us) : 0;
    for (unsigned i = 0; !is_live && i < count; i++)
        cycle(argv[1], us / count);
    if (!is_live)
        elapsed = now_us() - began;
    printf("{\"how\": \"%s\", \"count\": %u, \"kernels\": %llu, \"seconds\": %.3f, \"percent\": %.2f}\n", argv[1],
           count, (unsigned long long)launched, elapsed / 1e6, 100 * (double)launched * kernel_us / elapsed);
    return 0;
}

/*
 * figures.c: cost of the simulated driver's calls, printed as one JSON line. Runs on a simulated node and links both
 * libraries.
 *
 *   figures            CPU nanoseconds: cuInit with a first context, an NVML query, a launch
 *   figures hold       ready, holding a context, until standard input ends
 *   figures churn SEED takes and gives memory, launches, exports and frees until it is killed
 */
#include <cuda.h>
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static const char ptx[] = ".version 7.8\n.target sm_80\n.visible .entry work(.param .u64 p){ret;}\n";
enum { CALLS = 20000, BATCHES = 20, HELD = 32 };

static double now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static CUfunction begin(void)
{
    CUcontext ctx;
    CUmodule module;
    CUfunction function;
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRetain(&ctx, 0) == CUDA_SUCCESS && cuCtxSetCurrent(ctx) == CUDA_SUCCESS);
    CHECK(cuModuleLoadData(&module, ptx) == CUDA_SUCCESS);
    CHECK(cuModuleGetFunction(&function, module, "work") == CUDA_SUCCESS);
    return function;
}

/* The cheapest of several batches, which leaves out delays of a busy machine. */
#define COST(call)                                                                        \
    __extension__({                                                                       \
        double best = 1e18;                                                               \
        for (int b = 0; b < BATCHES; b++) {                                               \
            double start = now_ns(CLOCK_PROCESS_CPUTIME_ID);                              \
            for (int i = 0; i < CALLS / BATCHES; i++)                                     \
                call;                                                                     \
            double each = (now_ns(CLOCK_PROCESS_CPUTIME_ID) - start) / (CALLS / BATCHES); \
            best = each < best ? each : best;                                             \
        }                                                                                 \
        best;                                                                             \
    })

static void measure(void)
{
    nvmlDevice_t device;
    nvmlMemory_t memory;
    nvmlUtilization_t rates;
    unsigned int clock;
    double start = now_ns(CLOCK_MONOTONIC);
    CUfunction function = begin();
    double attach = now_ns(CLOCK_MONOTONIC) - start;
    CHECK(nvmlInit_v2() == NVML_SUCCESS && nvmlDeviceGetHandleByIndex_v2(0, &device) == NVML_SUCCESS);
    double memory_ns = COST(CHECK(nvmlDeviceGetMemoryInfo(device, &memory) == NVML_SUCCESS));
    double rates_ns = COST(CHECK(nvmlDeviceGetUtilizationRates(device, &rates) == NVML_SUCCESS));
    double clock_ns = COST(CHECK(nvmlDeviceGetClockInfo(device, NVML_CLOCK_SM, &clock) == NVML_SUCCESS));
    double launch_ns = COST(CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) == CUDA_SUCCESS));
    printf("{\"attach_ns\": %.0f, \"memory_ns\": %.0f, \"rates_ns\": %.0f, \"clock_ns\": %.0f, \"launch_ns\": %.0f}\n",
           attach, memory_ns, rates_ns, clock_ns, launch_ns);
}

static void churn(unsigned int seed)
{
    CUfunction function = begin();
    CUdeviceptr held[HELD] = {0};
    CUipcMemHandle handle;
    puts("ready");
    fflush(stdout);
    for (;;) {
        int at = rand_r(&seed) % HELD;
        if (held[at] != 0)
            CHECK(cuMemFree(held[at]) == CUDA_SUCCESS);
        held[at] = 0;
        CUresult result = cuMemAlloc(&held[at], 1u + (unsigned)rand_r(&seed) % (64u << 20));
        CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
        if (held[at] != 0 && seed % 7 == 0)
            CHECK(cuIpcGetMemHandle(&handle, held[at]) == CUDA_SUCCESS);
        CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) == CUDA_SUCCESS);
        if (seed % 16 == 0)
            CHECK(cuCtxSynchronize() == CUDA_SUCCESS);
    }
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "churn") == 0) {
        churn((unsigned int)atol(argv[2]));
    } else if (argc == 2 && strcmp(argv[1], "hold") == 0) {
        char byte;
        begin();
        puts("ready");
        fflush(stdout);
        while (read(0, &byte, 1) > 0)
            continue;
    } else {
        measure();
    }
    return 0;
}

/*
 * vgpu-pair: one rank of a job whose kernels wait for each other, as those of a collective operation do.
 *
 * vgpu-pair --file PATH --rank R [--device N] [--seconds S] [--think-us T] [--work N]: PATH is a page in /dev/shm that
 * both ranks (0 and 1) map. In each step, a rank's kernel writes there that it runs, and ends when the other rank's
 * kernel has written so too. T is the host's work between two steps. N is the number of kernels of 1 ms each that a
 * step runs before that, as a rank of a real job computes before a collective operation. With --host-ms M there is only
 * one rank: each kernel waits for a word that the host sets M ms after the launch. A kernel gives up after 20 s. The
 * output is one JSON object: the number of steps, and the longest step.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "check.h"
#include "limiter.h"

/* clang-format off */
#define SYMBOLS(X)                                                                                         \
    X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuModuleLoadData)            \
    X(cuModuleGetFunction) X(cuMemHostRegister_v2) X(cuMemHostGetDevicePointer_v2) X(cuLaunchKernel)        \
    X(cuCtxSynchronize)
/* clang-format on */

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SYMBOLS(MEMBER)
} cu;

enum { PAGE = 4096, APART = 64 }; /* the words of the two ranks are on separate cache lines */

static struct {
    const char *file;
    int rank, device, work;
    double seconds, think_us, host_ms;
} want = {.seconds = 2, .host_ms = -1};

static CUfunction kernel, work;
static uint64_t *page;
static CUdeviceptr page_device;

static const char ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n// vgpu-sim-waits\n// vgpu-sim-microseconds=20\n"
    ".visible .entry meet(.param .u64 word, .param .u64 value, .param .u64 says, .param .u64 limit)\n{\n"
    " .reg .pred %p;\n .reg .u64 %w, %v, %s, %l, %x, %t;\n"
    " ld.param.u64 %w, [word];\n ld.param.u64 %v, [value];\n ld.param.u64 %s, [says];\n ld.param.u64 %l, [limit];\n"
    " st.volatile.global.u64 [%s], %v;\n membar.sys;\n mov.u64 %t, %globaltimer;\n add.u64 %l, %l, %t;\n"
    "again:\n ld.volatile.global.u64 %x, [%w];\n setp.ge.u64 %p, %x, %v;\n @%p bra done;\n"
    " mov.u64 %t, %globaltimer;\n setp.lt.u64 %p, %t, %l;\n @%p bra again;\n"
    "done:\n ret;\n}\n";

static const char work_ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n// vgpu-sim-microseconds=1000\n"
    ".visible .entry work()\n{\n .reg .pred %p;\n .reg .u64 %l, %t;\n"
    " mov.u64 %l, %globaltimer;\n add.u64 %l, %l, 1000000;\n"
    "again:\n mov.u64 %t, %globaltimer;\n setp.lt.u64 %p, %t, %l;\n @%p bra again;\n ret;\n}\n";

#define DO(call) check(cu.call, #call)

static void fail(const char *what)
{
    fprintf(stderr, "vgpu-pair: %s\n", what);
    exit(3);
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void sleep_seconds(double seconds)
{
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
}

static void load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        fail(dlerror());
#define NEEDED(name)                                         \
    if ((*(void **)&cu.name = dlsym(handle, #name)) == NULL) \
        fail("no " #name);
    SYMBOLS(NEEDED)
}

static void open_page(void)
{
    int fd = want.file != NULL ? open(want.file, O_RDWR) : -1;
    int flags = want.file != NULL ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
    if (want.file != NULL && fd < 0)
        fail("cannot open the file");
    page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (page == MAP_FAILED)
        fail("cannot map the page");
    DO(cuMemHostRegister_v2(page, PAGE, CU_MEMHOSTREGISTER_DEVICEMAP));
    DO(cuMemHostGetDevicePointer_v2(&page_device, page, 0));
}

static void open_device(void)
{
    CUcontext context;
    CUdevice device;
    CUmodule module;
    DO(cuInit(0));
    DO(cuDeviceGet(&device, want.device));
    DO(cuDevicePrimaryCtxRetain(&context, device));
    DO(cuCtxSetCurrent(context));
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&kernel, module, "meet"));
    DO(cuModuleLoadData(&module, work_ptx));
    DO(cuModuleGetFunction(&work, module, "work"));
}

static uint64_t *word_of(int rank)
{
    return page + rank * APART;
}

static void *set_later(void *value)
{
    sleep_seconds(want.host_ms / 1e3);
    __atomic_store_n(word_of(1 - want.rank), (uint64_t)(uintptr_t)value, __ATOMIC_SEQ_CST);
    return NULL;
}

static void step(uint64_t number)
{
    uint64_t limit = 20000000000u;
    CUdeviceptr word = page_device + (CUdeviceptr)((1 - want.rank) * APART) * sizeof(*page);
    CUdeviceptr says = page_device + (CUdeviceptr)(want.rank * APART) * sizeof(*page);
    void *parameters[] = {&word, &number, &says, &limit};
    pthread_t thread;
    for (int i = 0; i < want.work; i++)
        DO(cuLaunchKernel(work, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    if (want.host_ms >= 0 && pthread_create(&thread, NULL, set_later, (void *)(uintptr_t)number) != 0)
        fail("cannot start a thread");
    DO(cuCtxSynchronize());
    if (want.host_ms >= 0)
        pthread_join(thread, NULL);
}

static void run(void)
{
    double began = now_seconds();
    double longest = 0;
    uint64_t steps = 0;
    for (double before = began; before - began < want.seconds; before = now_seconds()) {
        step(steps + 1);
        double took = now_seconds() - before;
        /* stops when the other rank has ended */
        if (__atomic_load_n(word_of(1 - want.rank), __ATOMIC_SEQ_CST) == UINT64_MAX)
            break;
        longest = took > longest ? took : longest;
        steps++;
        if (want.think_us > 0)
            sleep_seconds(want.think_us / 1e6);
    }
    double seconds = now_seconds() - began;
    __atomic_store_n(word_of(want.rank), UINT64_MAX, __ATOMIC_SEQ_CST);
    printf("{\"state\": \"pair\", \"steps\": %llu, \"seconds\": %.3f, \"longest_ms\": %.3f, \"libvgpu\": %s}\n",
           (unsigned long long)steps, seconds, longest * 1e3, limiter_loaded() ? "true" : "false");
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"file", required_argument, NULL, 'f'},     {"rank", required_argument, NULL, 'r'},
        {"device", required_argument, NULL, 'd'},   {"seconds", required_argument, NULL, 's'},
        {"think-us", required_argument, NULL, 't'}, {"host-ms", required_argument, NULL, 'h'},
        {"work", required_argument, NULL, 'w'},     {0}};
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'f':
            want.file = optarg;
            break;
        case 'r':
            want.rank = atoi(optarg);
            break;
        case 'd':
            want.device = atoi(optarg);
            break;
        case 's':
            want.seconds = strtod(optarg, NULL);
            break;
        case 't':
            want.think_us = strtod(optarg, NULL);
            break;
        case 'w':
            want.work = atoi(optarg);
            break;
        case 'h':
            want.host_ms = strtod(optarg, NULL);
            break;
        default:
            return 2;
        }
    }
    if ((want.rank != 0 && want.rank != 1) || (want.file == NULL && want.host_ms < 0))
        return 2;
    load();
    open_device();
    open_page();
    run();
    return 0;
}

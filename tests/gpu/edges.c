/*
 * edges.c: rare behaviour of programs. Each way runs with libvgpu preloaded, on the simulated node and on a real
 * device.
 *
 *   edges WAY [FILE]
 *     launch   a kernel, in a program with TLS_BYTES of thread-local storage
 *     stdio    works, and writes to its standard output, which it was started without; its verdict goes to FILE
 *     fork     forks when a byte comes on standard input, while another thread is in its first cuInit; the child, too,
 *              calls it
 *     cancel   threads that launch are cancelled, one after the other
 *     unmap    one cuMemUnmap over a mapping of an imported handle and one of its own
 *     close    allocates, closes all descriptors above 2 as a daemon does, says so, and ends with its standard input
 *     outside  makes a memory pool on the second device, which the lease does not have
 *     busy     computes without end in a thread; forks at each f on standard input, and says so when the child has
 *              ended; executes itself as `launch` at an e
 * Exit status 0, or a message.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#ifdef TLS_BYTES
static __thread volatile char storage[TLS_BYTES];
#endif

#define SYMBOLS(X)              \
    X(cuInit)                   \
    X(cuDeviceGet)              \
    X(cuDevicePrimaryCtxRetain) \
    X(cuCtxSetCurrent)          \
    X(cuCtxSynchronize)         \
    X(cuModuleLoadData)         \
    X(cuModuleGetFunction)      \
    X(cuLaunchKernel)           \
    X(cuMemAlloc_v2)            \
    X(cuMemFree_v2)             \
    X(cuMemGetInfo_v2)          \
    X(cuMemCreate)              \
    X(cuMemRelease)             \
    X(cuMemAddressReserve)      \
    X(cuMemAddressFree)         \
    X(cuMemMap)                 \
    X(cuMemUnmap)               \
    X(cuMemPoolCreate)          \
    X(cuMemGetAllocationGranularity) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SYMBOLS(MEMBER)
} cu;

enum { PIECE_BYTES = 64 << 20, CANCELS = 100, IN_FLIGHT = 16, BUSY_ITERATIONS = 50000 };

static const char ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry one()\n{\n ret;\n}\n"
    ".visible .entry busy(.param .u64 iterations)\n{\n .reg .pred %p;\n .reg .u64 %n, %c;\n"
    " ld.param.u64 %n, [iterations];\n"
    "again:\n mov.u64 %c, %clock64;\n sub.u64 %n, %n, 1;\n setp.ne.u64 %p, %n, 0;\n @%p bra again;\n ret;\n}\n";
static FILE *out;

static void fail(const char *what, long figure)
{
    fprintf(out, "edges: %s: %ld\n", what, figure);
    fflush(out);
    _exit(1);
}

static void check(CUresult result, const char *call)
{
    if (result != CUDA_SUCCESS)
        fail(call, result);
}
#define DO(call) check(cu.call, #call)

static void load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define FIND(name)                                                             \
    if (handle == NULL || (*(void **)&cu.name = dlsym(handle, #name)) == NULL) \
        check(CUDA_ERROR_NOT_FOUND, #name);
    SYMBOLS(FIND)
}

static CUcontext begin(void)
{
    CUdevice device;
    CUcontext context;
    DO(cuInit(0));
    DO(cuDeviceGet(&device, 0));
    DO(cuDevicePrimaryCtxRetain(&context, device));
    DO(cuCtxSetCurrent(context));
    return context;
}

static CUfunction function_named(const char *name)
{
    CUmodule module;
    CUfunction function;
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&function, module, name));
    return function;
}

static CUfunction function_here(void)
{
    return function_named("one");
}

static void launch(CUfunction function)
{
    DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
}

static void try_launch(void)
{
    begin();
    launch(function_here());
    DO(cuCtxSynchronize());
#ifdef TLS_BYTES
    storage[TLS_BYTES - 1] = 1;
#endif
}

/* Writes to descriptors 1 and 2, which may be closed. libvgpu must not use descriptors with these numbers. */
static void try_stdio(void)
{
    static const char line[] = "progress: epoch 1, loss 0.25, step 1 of 1000\n";
    CUdeviceptr pointer;
    CUcontext context = begin();
    CUfunction function = function_here();
    for (int i = 0; i < 1000; i++) {
        (void)!write(STDOUT_FILENO, line, sizeof(line) - 1);
        (void)!write(STDERR_FILENO, line, sizeof(line) - 1);
        launch(function);
        DO(cuMemAlloc_v2(&pointer, PIECE_BYTES));
        DO(cuMemFree_v2(pointer));
    }
    DO(cuCtxSetCurrent(context));
    DO(cuCtxSynchronize());
}

static void *init_elsewhere(void *unused)
{
    (void)unused;
    DO(cuInit(0));
    return NULL;
}

static void try_fork(void)
{
    pthread_t thread;
    int status;
    char byte;
    if (pthread_create(&thread, NULL, init_elsewhere, NULL) != 0 || read(STDIN_FILENO, &byte, 1) != 1)
        fail("setup", 0);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr pointer;
        begin();
        DO(cuMemAlloc_v2(&pointer, PIECE_BYTES));
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("child", status);
    pthread_join(thread, NULL);
    try_launch();
}

struct launcher {
    CUcontext context;
    CUfunction function;
    uint64_t launched;
};

static void *launch_for_ever(void *argument)
{
    struct launcher *launcher = argument;
    DO(cuCtxSetCurrent(launcher->context));
    for (;;) {
        launch(launcher->function);
        if (__atomic_add_fetch(&launcher->launched, 1, __ATOMIC_SEQ_CST) % IN_FLIGHT == 0)
            DO(cuCtxSynchronize());
        pthread_testcancel();
    }
    return NULL;
}

static void try_cancel(void)
{
    struct launcher launcher = {.context = begin(), .function = function_here()};
    for (int i = 0; i < CANCELS; i++) {
        pthread_t threads[2];
        uint64_t before = __atomic_load_n(&launcher.launched, __ATOMIC_SEQ_CST);
        for (int t = 0; t < 2; t++)
            if (pthread_create(&threads[t], NULL, launch_for_ever, &launcher) != 0)
                fail("thread", t);
        while (__atomic_load_n(&launcher.launched, __ATOMIC_SEQ_CST) < before + (uint64_t)(i % 5))
            usleep(200);
        for (int t = 0; t < 2; t++)
            pthread_cancel(threads[t]);
        for (int t = 0; t < 2; t++)
            pthread_join(threads[t], NULL);
    }
    launch(launcher.function);
    DO(cuCtxSynchronize());
}

static size_t free_bytes(void)
{
    size_t left;
    size_t total;
    DO(cuMemGetInfo_v2(&left, &total));
    return left;
}

static void try_unmap(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}},
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    CUmemGenericAllocationHandle shared;
    CUmemGenericAllocationHandle imported;
    CUmemGenericAllocationHandle own;
    CUdeviceptr at;
    size_t granularity;
    int fd = -1;
    begin();
    DO(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    size_t bytes = (PIECE_BYTES + granularity - 1) / granularity * granularity;
    size_t before = free_bytes();
    for (int round = 0; round < 4; round++) {
        DO(cuMemCreate(&shared, bytes, &prop, 0));
        DO(cuMemExportToShareableHandle(&fd, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        DO(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(fd);
        DO(cuMemCreate(&own, bytes, &prop, 0));
        DO(cuMemAddressReserve(&at, 2 * bytes, 0, 0, 0));
        DO(cuMemMap(at, bytes, 0, imported, 0));
        DO(cuMemMap(at + bytes, bytes, 0, own, 0));
        DO(cuMemRelease(own));
        DO(cuMemRelease(imported));
        DO(cuMemRelease(shared));
        DO(cuMemUnmap(at, 2 * bytes));
        DO(cuMemAddressFree(at, 2 * bytes));
    }
    long kept = (long)before - (long)free_bytes();
    if (kept >= (long)bytes)
        fail("bytes that stay charged after cuMemUnmap", kept);
}

static void try_close(void)
{
    CUdeviceptr pointer;
    char byte;
    begin();
    DO(cuMemAlloc_v2(&pointer, PIECE_BYTES));
    for (int fd = 3; fd < 100; fd++)
        close(fd);
    (void)!write(STDOUT_FILENO, "closed\n", 7);
    (void)!read(STDIN_FILENO, &byte, 1);
}

static void try_outside(void)
{
    CUmemoryPool pool;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, {1}}};
    begin();
    CUresult result = cu.cuMemPoolCreate(&pool, &props);
    if (result != CUDA_ERROR_NOT_PERMITTED)
        fail("cuMemPoolCreate", result);
}

static void *compute_for_ever(void *argument)
{
    struct launcher *launcher = argument;
    uint64_t iterations = BUSY_ITERATIONS;
    void *parameters[] = {&iterations};
    DO(cuCtxSetCurrent(launcher->context));
    for (;;) {
        for (int i = 0; i < IN_FLIGHT; i++)
            DO(cuLaunchKernel(launcher->function, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
        DO(cuCtxSynchronize());
    }
    return NULL;
}

static void try_busy(void)
{
    static const char forked[] = "forked\n";
    pthread_t thread;
    char byte;
    CUcontext context = begin();
    struct launcher launcher = {.context = context, .function = function_named("busy")};
    if (pthread_create(&thread, NULL, compute_for_ever, &launcher) != 0)
        fail("thread", 0);
    while (read(STDIN_FILENO, &byte, 1) == 1 && byte == 'f') {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (waitpid(child, &status, 0) != child || status != 0)
            fail("child", status);
        (void)!write(STDOUT_FILENO, forked, sizeof(forked) - 1);
    }
    execl("/proc/self/exe", "edges", "launch", (char *)NULL);
    fail("exec", 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } ways[] = {{"launch", try_launch}, {"stdio", try_stdio}, {"fork", try_fork},       {"cancel", try_cancel},
                {"unmap", try_unmap},   {"close", try_close}, {"outside", try_outside}, {"busy", try_busy}};
    int first = argc > 2 ? open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0600) : STDERR_FILENO;
    out = fdopen(fcntl(first, F_DUPFD, 100), "w");
    if (argc > 2)
        close(first); /* `first` may have the number of a closed standard stream */
    load();
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        if (argc > 1 && strcmp(argv[1], ways[i].name) == 0) {
            ways[i].run();
            if (argc > 2)
                fprintf(out, "right\n");
            fflush(out);
            _exit(0);
        }
    fprintf(out, "usage: edges WAY [FILE]\n");
    return 2;
}

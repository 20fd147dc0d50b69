/*
 * storm.c: threads that make calls of all memory families at once, in a random order: plain memory, pools, graphs whose
 * memory outlives them or not, captures, arrays, mapped memory, streams and contexts of their own. A child is forked
 * meanwhile. An answer other than success or out of memory is printed, and makes the exit status 1.
 *
 * storm THREADS STEPS ROUNDS [alone] prints the free memory, in MiB, before the first round and after each, and then
 * waits for a line or the end of its input. With
 * `alone` no child is forked: the thread sanitizer cannot start a thread in a child of a process with threads.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define THREADS_MAX 64
#define POINTERS 8
#define CHECK(call) check(__LINE__, #call, call)

static CUcontext context;
static CUfunction function;
static int steps;
static int wrong;

static int check(int line, const char *call, CUresult result)
{
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
        fprintf(stderr, "%d: %s: %d\n", line, call, result);
        __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
    return result == CUDA_SUCCESS;
}

struct worker {
    unsigned seed;
    CUstream stream;
    CUdeviceptr pointers[POINTERS];
    CUmemoryPool pool;
};

static unsigned any(struct worker *w, unsigned below)
{
    w->seed = w->seed * 1664525u + 1013904223u;
    return (w->seed >> 8) % below;
}

static void plain(struct worker *w)
{
    CUdeviceptr *pointer = &w->pointers[any(w, POINTERS)];
    if (*pointer != 0)
        CHECK(cuMemFree(*pointer));
    if (*pointer != 0 || !CHECK(cuMemAlloc(pointer, (1 + any(w, 4096)) * 1024)))
        *pointer = 0;
}

static void stream_ordered(struct worker *w)
{
    CUdeviceptr pointer;
    if (CHECK(cuMemAllocAsync(&pointer, (1 + any(w, 64)) * MIB, w->stream)))
        CHECK(cuMemFreeAsync(pointer, w->stream));
}

static void graph(struct worker *w)
{
    CUgraph made;
    CUgraphExec exec;
    CUgraphNode node, end;
    CUDA_MEM_ALLOC_NODE_PARAMS shape;
    int frees = (int)any(w, 2);
    memset(&shape, 0, sizeof(shape));
    shape.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    shape.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    shape.bytesize = (1 + any(w, 64)) * MIB;
    if (!CHECK(cuGraphCreate(&made, 0)) || !CHECK(cuGraphAddMemAllocNode(&node, made, NULL, 0, &shape)))
        return;
    if (frees)
        CHECK(cuGraphAddMemFreeNode(&end, made, &node, 1, shape.dptr));
    CHECK(cuGraphInstantiateWithFlags(&exec, made, 0));
    for (int i = 0; i < 3; i++)
        if (CHECK(cuGraphLaunch(exec, w->stream)) && !frees)
            CHECK(cuMemFreeAsync(shape.dptr, w->stream));
    CHECK(cuStreamSynchronize(w->stream));
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuGraphDestroy(made));
}

static void capture(struct worker *w)
{
    CUgraph made;
    CUgraphExec exec;
    CUdeviceptr pointer;
    CHECK(cuStreamBeginCapture(w->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cuMemAllocAsync(&pointer, 4 * MIB, w->stream));
    CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, w->stream, NULL, NULL));
    CHECK(cuMemFreeAsync(pointer, w->stream));
    if (!CHECK(cuStreamEndCapture(w->stream, &made)) || !CHECK(cuGraphInstantiateWithFlags(&exec, made, 0)))
        return;
    CHECK(cuGraphLaunch(exec, w->stream));
    CHECK(cuStreamSynchronize(w->stream));
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuGraphDestroy(made));
}

static void own_pool(struct worker *w)
{
    CUmemPoolProps shape = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUdeviceptr pointer;
    if (w->pool == NULL) {
        CHECK(cuMemPoolCreate(&w->pool, &shape));
        return;
    }
    if (CHECK(cuMemAllocFromPoolAsync(&pointer, 8 * MIB, w->pool, w->stream)))
        CHECK(cuMemFreeAsync(pointer, w->stream));
    CHECK(cuStreamSynchronize(w->stream));
    CHECK(cuMemPoolDestroy(w->pool));
    w->pool = NULL;
}

static void mapped(struct worker *w)
{
    CUmemAllocationProp shape = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr range;
    (void)w;
    if (!CHECK(cuMemCreate(&handle, 2 * MIB, &shape, 0)))
        return;
    CHECK(cuMemAddressReserve(&range, 2 * MIB, 0, 0, 0));
    CHECK(cuMemMap(range, 2 * MIB, 0, handle, 0));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemUnmap(range, 2 * MIB));
    CHECK(cuMemAddressFree(range, 2 * MIB));
}

static void array_and_stream(struct worker *w)
{
    CUDA_ARRAY_DESCRIPTOR shape = {64, 64, CU_AD_FORMAT_FLOAT, 1};
    CUarray array;
    CUstream other;
    (void)w;
    if (CHECK(cuArrayCreate(&array, &shape)))
        CHECK(cuArrayDestroy(array));
    if (CHECK(cuStreamCreate(&other, CU_STREAM_DEFAULT)))
        CHECK(cuStreamDestroy(other));
}

/* At times makes a context, allocates in it, and destroys it. Half of these allocations end only with the context. */
static void own_context(struct worker *w)
{
    CUcontext other;
    CUdeviceptr pointer;
    if (any(w, 8) != 0 || !CHECK(cuCtxCreate(&other, NULL, 0, 0)))
        return;
    if (CHECK(cuMemAlloc(&pointer, (1 + any(w, 4096)) * 1024)) && any(w, 2) == 0)
        CHECK(cuMemFree(pointer));
    CHECK(cuCtxDestroy(other));
    CHECK(cuCtxSetCurrent(context));
}

static void work(struct worker *w)
{
    size_t rest, all;
    CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, w->stream, NULL, NULL));
    CHECK(cuMemGetInfo(&rest, &all));
    CHECK(cuStreamSynchronize(w->stream));
}

static void *run(void *argument)
{
    static void (*const calls[])(struct worker *) = {plain,  stream_ordered,   graph,       capture, own_pool,
                                                     mapped, array_and_stream, own_context, work};
    struct worker w = {.seed = (unsigned)(size_t)argument};
    CHECK(cuCtxSetCurrent(context));
    if (!CHECK(cuStreamCreate(&w.stream, CU_STREAM_NON_BLOCKING)))
        return NULL;
    for (int i = 0; i < steps; i++)
        calls[any(&w, sizeof(calls) / sizeof(calls[0]))](&w);
    for (int i = 0; i < POINTERS; i++)
        if (w.pointers[i] != 0)
            CHECK(cuMemFree(w.pointers[i]));
    if (w.pool != NULL)
        CHECK(cuMemPoolDestroy(w.pool));
    CHECK(cuStreamDestroy(w.stream));
    return NULL;
}

/* The child makes only one driver call, which must answer that the driver is not initialised in the child. */
static void fork_a_child(void)
{
    size_t rest, all;
    int status;
    pid_t child = fork();
    if (child == 0)
        _exit(cuMemGetInfo(&rest, &all) == CUDA_SUCCESS);
    if (waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "the child ended with %#x\n", (unsigned)status);
        wrong = 1;
    }
}

static void say_free(void)
{
    CUmemoryPool pool;
    CUstream stream;
    size_t rest = 0, all;
    CHECK(cuCtxSynchronize());
    CHECK(cuDeviceGraphMemTrim(0));
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cuMemPoolTrimTo(pool, 0));
    if (CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT))) /* libvgpu measures what the driver holds */
        CHECK(cuStreamDestroy(stream));
    CHECK(cuMemGetInfo(&rest, &all));
    printf("%zu\n", (size_t)(rest / MIB));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const char image[] = ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry work(){ ret; }\n";
    pthread_t threads[THREADS_MAX];
    CUmodule module;
    int count = argc > 3 && atoi(argv[1]) < THREADS_MAX ? atoi(argv[1]) : 1;
    steps = argc > 3 ? atoi(argv[2]) : 1;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, image));
    CHECK(cuModuleGetFunction(&function, module, "work"));
    say_free();
    for (int round = 0; round < (argc > 3 ? atoi(argv[3]) : 1); round++) {
        for (int i = 0; i < count; i++)
            pthread_create(&threads[i], NULL, run, (void *)(size_t)(1 + i + round * THREADS_MAX));
        if (argc < 5)
            fork_a_child();
        for (int i = 0; i < count; i++)
            pthread_join(threads[i], NULL);
        say_free();
    }
    getchar(); /* the test reads the ledger meanwhile */
    return wrong;
}

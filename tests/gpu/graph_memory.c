/*
 * graph_memory.c: measures what a driver holds for graphs with memory nodes, after each step: two graphs on one stream
 * and on two, one behind the other and both waiting, memory that outlives its launch, executables that end, trims.
 * Prints one JSON object for each step: the driver's RESERVED and USED, and the decrease of the device's free memory.
 *
 * graph_memory [STEP_MIB] needs a real device, because the steps delay streams by host functions
 */
#include <cuda.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define CHECK(call)                                      \
    do {                                                 \
        CUresult result_ = (call);                       \
        if (result_ != CUDA_SUCCESS) {                   \
            fprintf(stderr, "%s: %d\n", #call, result_); \
            exit(1);                                     \
        }                                                \
    } while (0)

struct graph {
    CUgraph graph;
    CUgraphExec exec;
    CUdeviceptr pointer[64];
};

static size_t unit = 64 * MIB;
static size_t free_at_first;
static CUstream one, two;
static atomic_int held;

static void say(const char *what)
{
    cuuint64_t reserved = 0, used = 0;
    size_t rest, all;
    CHECK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved));
    CHECK(cuDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used));
    CHECK(cuMemGetInfo(&rest, &all));
    printf("{\"step\": \"%s\", \"reserved_mib\": %llu, \"used_mib\": %llu, \"card_mib\": %lld}\n", what,
           (unsigned long long)(reserved / MIB), (unsigned long long)(used / MIB),
           (long long)(free_at_first - rest) / (long long)MIB);
    fflush(stdout);
}

/*
 * Makes a graph of `count` allocations of `bytes`. With `frees` the graph also frees each allocation after the work on
 * it; with `beside` only after all allocations.
 */
static struct graph make(size_t bytes, int count, int frees, int beside)
{
    struct graph g = {0};
    CUgraphNode allocated[64], last = NULL;
    CUDA_MEM_ALLOC_NODE_PARAMS shape;
    CUcontext context;
    CHECK(cuCtxGetCurrent(&context));
    CHECK(cuGraphCreate(&g.graph, 0));
    for (int i = 0; i < count; i++) {
        memset(&shape, 0, sizeof(shape));
        shape.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        shape.poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
        shape.bytesize = bytes;
        CHECK(cuGraphAddMemAllocNode(&allocated[i], g.graph, last == NULL ? NULL : &last, last != NULL, &shape));
        g.pointer[i] = shape.dptr;
        CUDA_MEMSET_NODE_PARAMS set = {.dst = shape.dptr, .value = 1, .elementSize = 1, .width = bytes, .height = 1};
        CHECK(cuGraphAddMemsetNode(&last, g.graph, &allocated[i], 1, &set, context));
        if (frees && !beside) {
            CUgraphNode end;
            CHECK(cuGraphAddMemFreeNode(&end, g.graph, &last, 1, shape.dptr));
            last = end;
        }
    }
    for (int i = 0; frees && beside && i < count; i++) {
        CUgraphNode end;
        CHECK(cuGraphAddMemFreeNode(&end, g.graph, &last, 1, g.pointer[i]));
    }
    CHECK(cuGraphInstantiateWithFlags(&g.exec, g.graph, 0));
    return g;
}

static void drop(struct graph *g)
{
    CHECK(cuGraphExecDestroy(g->exec));
    CHECK(cuGraphDestroy(g->graph));
}

static void wait_for_release(void *unused)
{
    (void)unused;
    for (int i = 0; i < 10000 && atomic_load(&held); i++)
        usleep(100);
}

static void hold(CUstream stream)
{
    atomic_store(&held, 1);
    CHECK(cuLaunchHostFunc(stream, wait_for_release, NULL));
}

static void release(void)
{
    atomic_store(&held, 0);
    CHECK(cuCtxSynchronize());
}

static void launch(struct graph *g, CUstream stream, const char *what)
{
    CUresult result = cuGraphLaunch(g->exec, stream);
    if (result != CUDA_SUCCESS)
        fprintf(stderr, "%s: %d\n", what, result);
    say(what);
}

static void trim(const char *what)
{
    CHECK(cuDeviceGraphMemTrim(0));
    say(what);
}

static void on_one_stream(struct graph *a, struct graph *b)
{
    launch(a, one, "a on one");
    launch(b, one, "b on one, right behind it");
    release();
    launch(b, one, "b on one again, all idle before");
    release();
    launch(a, one, "a on one again");
    release();
}

static void on_two_streams(struct graph *a, struct graph *b)
{
    launch(a, two, "a on two, all idle before");
    release();
    hold(two);
    launch(a, two, "a on two, waiting");
    launch(b, one, "b on one, a waits on two");
    launch(a, two, "a on two again, behind itself");
    release();
    launch(a, one, "a on one, all idle before");
    release();
    hold(one);
    launch(a, one, "a on one, waiting");
    launch(b, two, "b on two, a waits on one");
    launch(b, one, "b on one, behind a, itself unfinished on two");
    trim("trim while both wait");
    release();
    say("both done");
    trim("trim, all idle");
    launch(a, one, "a on one after the trim");
    CHECK(cuGraphUpload(b->exec, two));
    release();
    say("b uploaded to two");
    launch(b, two, "b on two after its upload");
    release();
}

static void beyond_the_launch(struct graph *a)
{
    struct graph k = make(4 * unit, 1, 0, 0);
    trim("trim before the graph that keeps its memory");
    launch(a, one, "a on one");
    release();
    launch(&k, one, "k (keeps its memory) on one, all idle before");
    release();
    launch(a, one, "a on one while k's memory lives");
    release();
    CHECK(cuMemFreeAsync(k.pointer[0], one));
    release();
    say("k's memory freed");
    launch(&k, one, "k on one again");
    launch(a, one, "a on one behind it");
    release();
    CHECK(cuMemFree(k.pointer[0]));
    say("k's memory freed by cuMemFree");
    drop(&k);
    say("k destroyed");
}

static void ends(struct graph *a, struct graph *b)
{
    drop(a);
    drop(b);
    say("a and b destroyed");
    struct graph c = make(6 * unit, 1, 1, 0);
    say("c (half as large again) instantiated");
    launch(&c, one, "c on one");
    release();
    drop(&c);
    trim("c destroyed, trim");
    struct graph in_turn = make(unit, 8, 1, 0), beside = make(unit, 8, 1, 1), small = make(MIB, 64, 1, 1),
                 middle = make(20 * MIB, 8, 1, 1);
    launch(&in_turn, one, "8 units in turn, each freed before the next");
    release();
    trim("trim");
    launch(&beside, one, "8 units beside each other");
    release();
    trim("trim");
    launch(&small, one, "64 of 1 MiB beside each other");
    release();
    trim("trim");
    launch(&middle, one, "8 of 20 MiB beside each other");
    release();
    trim("trim");
}

int main(int argc, char **argv)
{
    CUcontext context;
    size_t all;
    if (argc > 1)
        unit = (size_t)atol(argv[1]) * MIB;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemGetInfo(&free_at_first, &all));
    struct graph a = make(4 * unit, 1, 1, 0), b = make(4 * unit, 1, 1, 0);
    say("a and b instantiated");
    on_one_stream(&a, &b);
    on_two_streams(&a, &b);
    beyond_the_launch(&a);
    ends(&a, &b);
    return 0;
}

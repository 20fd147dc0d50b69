/*
 * each_failure.c: a limited program in which, one at a time, each call of the driver fails, each allocation of libvgpu
 * fails (fake/failing.c), and the slice is full at each of its pages. Each family of calls runs again and again: with a
 * failure at its first call, its second, and so on, until it runs to its end. Then all that it made is freed. The ledger
 * and the driver must have as much free memory as before, and the program no answer but success and that failure's.
 * Evictable memory (argument `evictable`) that the driver did not free may be left, but is charged.
 *
 * It prints the number of failures of each kind, and waits for a line or the end of its input.
 */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake/failing.h"

#define MIB (1ull << 20)
#define MADE(call) made(#call, call)
#define ENDED(object, call) ((object) != 0 && MADE(call) ? (void)((object) = 0) : (void)0)

static CUcontext context;
static CUresult allowed;  /* the answer to the failure that is tried now */
static int evictable;     /* libvgpu can evict the memory */
static const char *wrong; /* the first call with another answer than this and success */
static CUresult wrong_answer;
static int refused; /* number of calls with the allowed answer */

static int made(const char *call, CUresult answer)
{
    if (answer != CUDA_SUCCESS && answer != allowed && wrong == NULL) {
        wrong = call;
        wrong_answer = answer;
    }
    refused += answer != CUDA_SUCCESS && answer == allowed;
    return answer == CUDA_SUCCESS;
}

/* --- plain memory */

static CUdeviceptr plain[3];

static void end_plain(void)
{
    for (int i = 0; i < 3; i++)
        ENDED(plain[i], cuMemFree(plain[i]));
}

static void run_plain(void)
{
    size_t pitch;
    if (MADE(cuMemAlloc(&plain[0], 5 * MIB)) && MADE(cuMemAllocPitch(&plain[1], &pitch, 1000, 4000, 4)) &&
        MADE(cuMemAllocManaged(&plain[2], 4 * MIB, CU_MEM_ATTACH_GLOBAL)))
        end_plain();
}

/* --- physical memory and its mappings */

static CUmemGenericAllocationHandle handle, second;
static CUdeviceptr range, mapping;

static void end_mapped(void)
{
    ENDED(second, cuMemRelease(second));
    ENDED(mapping, cuMemUnmap(mapping, 4 * MIB));
    ENDED(handle, cuMemRelease(handle));
    if (mapping == 0)
        ENDED(range, cuMemAddressFree(range, 4 * MIB));
}

static void run_mapped(void)
{
    CUmemAllocationProp shape = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAccessDesc access = {.location = shape.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (!MADE(cuMemCreate(&handle, 4 * MIB, &shape, 0)))
        handle = 0; /* the driver had made it, and libvgpu has released it */
    if (handle == 0 || !MADE(cuMemAddressReserve(&range, 4 * MIB, 0, 0, 0)) ||
        !MADE(cuMemMap(range, 4 * MIB, 0, handle, 0)))
        return;
    mapping = range;
    if (MADE(cuMemSetAccess(range, 4 * MIB, &access, 1)) &&
        MADE(cuMemGetAllocationPropertiesFromHandle(&shape, handle)) &&
        MADE(cuMemRetainAllocationHandle(&second, (void *)(uintptr_t)range)))
        end_mapped();
}

/* --- stream-ordered memory */

static CUmemoryPool pool;
static CUdeviceptr ordered, of_pool, late;

static void end_ordered(void)
{
    CUmemoryPool current;
    ENDED(ordered, cuMemFreeAsync(ordered, NULL));
    ENDED(of_pool, cuMemFreeAsync(of_pool, NULL));
    ENDED(late, cuMemFreeAsync(late, NULL));
    if (MADE(cuStreamSynchronize(NULL)) && MADE(cuDeviceGetDefaultMemPool(&current, 0)))
        (void)MADE(cuMemPoolTrimTo(current, 0));
    if (of_pool == 0)
        ENDED(pool, cuMemPoolDestroy(pool));
}

static void run_ordered(void)
{
    CUmemPoolProps shape = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    cuuint64_t keep = UINT64_MAX;
    if (MADE(cuMemAllocAsync(&ordered, 40 * MIB, NULL)) && MADE(cuMemPoolCreate(&pool, &shape)) &&
        MADE(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)) &&
        MADE(cuMemAllocFromPoolAsync(&of_pool, 8 * MIB, pool, NULL)) && MADE(cuMemAlloc(&late, 4 * MIB)))
        end_ordered();
}

/* --- graphs with memory, added as nodes and captured */

static CUgraph graph;
static CUgraphExec exec;
static CUstream stream;

static void end_graph(void)
{
    CUgraph captured = NULL;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (stream != NULL && MADE(cuStreamIsCapturing(stream, &status)) && status != CU_STREAM_CAPTURE_STATUS_NONE)
        (void)MADE(cuStreamEndCapture(stream, &captured));
    ENDED(captured, cuGraphDestroy(captured));
    if (stream != NULL)
        (void)MADE(cuStreamSynchronize(stream));
    ENDED(exec, cuGraphExecDestroy(exec));
    ENDED(graph, cuGraphDestroy(graph));
    (void)MADE(cuDeviceGraphMemTrim(0));
    ENDED(stream, cuStreamDestroy(stream));
}

static void run_graph(void)
{
    CUDA_MEM_ALLOC_NODE_PARAMS shape = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
        .bytesize = 40 * MIB};
    CUDA_GRAPH_INSTANTIATE_PARAMS upload = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
    CUgraphNode node, end;
    if (MADE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) && MADE(cuGraphCreate(&graph, 0)) &&
        MADE(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &shape)) &&
        MADE(cuGraphAddMemFreeNode(&end, graph, &node, 1, shape.dptr)) &&
        MADE(cuGraphInstantiateWithParams(&exec, graph, &upload)) && MADE(cuGraphLaunch(exec, stream)))
        end_graph();
}

static void run_capture(void)
{
    CUdeviceptr pointer;
    if (MADE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) &&
        MADE(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)) &&
        MADE(cuMemAllocAsync(&pointer, 4 * MIB, stream)) && MADE(cuMemFreeAsync(pointer, stream)) &&
        MADE(cuStreamEndCapture(stream, &graph)) && MADE(cuGraphInstantiateWithFlags(&exec, graph, 0)) &&
        MADE(cuGraphUpload(exec, stream)) && MADE(cuGraphLaunch(exec, stream)))
        end_graph();
}

/* --- arrays, streams, code: memory whose size only the driver knows */

static CUarray array;
static CUmipmappedArray mipmap;

static void end_array(void)
{
    ENDED(array, cuArrayDestroy(array));
    ENDED(mipmap, cuMipmappedArrayDestroy(mipmap));
}

static void run_array(void)
{
    CUDA_ARRAY_DESCRIPTOR flat = {1024, 1024, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR levels = {.Width = 512, .Height = 512, .Format = CU_AD_FORMAT_HALF, .NumChannels = 4};
    if (MADE(cuArrayCreate(&array, &flat)) && MADE(cuMipmappedArrayCreate(&mipmap, &levels, 4)))
        end_array();
}

static const char image[] = ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry work(){ ret; }\n";
static CUmodule module;
static CUlibrary library;

static void end_code(void)
{
    if (stream != NULL)
        (void)MADE(cuStreamSynchronize(stream));
    ENDED(stream, cuStreamDestroy(stream));
    ENDED(module, cuModuleUnload(module));
    ENDED(library, cuLibraryUnload(library));
}

static void run_code(void)
{
    CUfunction function;
    CUkernel kernel;
    if (MADE(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0)) &&
        MADE(cuModuleLoadData(&module, image)) && MADE(cuModuleGetFunction(&function, module, "work")) &&
        MADE(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)) &&
        MADE(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0)) &&
        MADE(cuLibraryGetKernel(&kernel, library, "work")) && MADE(cuKernelGetFunction(&function, kernel)))
        end_code();
}

/* --- contexts */

static CUcontext own;
static int retained;

static void end_context(void)
{
    ENDED(own, cuCtxDestroy(own));
    if (retained && MADE(cuDevicePrimaryCtxRelease(0)))
        retained = 0;
}

static void run_context(void)
{
    CUdeviceptr pointer;
    CUcontext again;
    if (!MADE(cuDevicePrimaryCtxRetain(&again, 0)))
        return;
    retained = 1;
    if (MADE(cuCtxCreate(&own, NULL, 0, 0)) && MADE(cuMemAlloc(&pointer, 4 * MIB)))
        end_context(); /* frees the memory, too */
}

static CUgreenCtx green;

static void end_green(void)
{
    (void)MADE(cuCtxSetCurrent(context));
    ENDED(stream, cuStreamDestroy(stream));
    if (stream == NULL)
        ENDED(green, cuGreenCtxDestroy(green));
}

static void run_green(void)
{
    CUdevResource whole, part, rest;
    CUdevResourceDesc description;
    CUcontext of_green;
    unsigned parts = 1;
    if (MADE(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM)) &&
        MADE(cuDevSmResourceSplitByCount(&part, &parts, &whole, &rest, 0, 16)) &&
        MADE(cuDevResourceGenerateDesc(&description, &part, 1)) &&
        MADE(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM)) &&
        MADE(cuCtxFromGreenCtx(&of_green, green)) && MADE(cuCtxSetCurrent(of_green)) &&
        MADE(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0)))
        end_green();
}

/* --- work: launches and copies, large enough to pass the gate */

static CUdeviceptr rows;
static char *host;

static void end_work(void)
{
    if (MADE(cuCtxSynchronize()))
        ENDED(rows, cuMemFree(rows));
    free(host);
    host = NULL;
    end_code();
}

static int copies(void)
{
    CUDA_MEMCPY2D flat = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                          .srcHost = host,
                          .srcPitch = MIB,
                          .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                          .dstDevice = rows,
                          .dstPitch = MIB,
                          .WidthInBytes = MIB,
                          .Height = 2};
    CUDA_MEMCPY3D deep = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                          .srcDevice = rows,
                          .srcPitch = MIB,
                          .srcHeight = 1,
                          .dstMemoryType = CU_MEMORYTYPE_HOST,
                          .dstHost = host,
                          .dstPitch = MIB,
                          .dstHeight = 1,
                          .WidthInBytes = MIB,
                          .Height = 1,
                          .Depth = 2};
    CUdeviceptr half = rows + MIB;
    return MADE(cuMemcpy(rows, half, MIB)) && MADE(cuMemcpyAsync(rows, half, MIB, stream)) &&
           MADE(cuMemcpyPeer(rows, context, half, context, MIB)) &&
           MADE(cuMemcpyPeerAsync(rows, context, half, context, MIB, stream)) &&
           MADE(cuMemcpyHtoD(rows, host, 2 * MIB)) && MADE(cuMemcpyDtoH(host, rows, 2 * MIB)) &&
           MADE(cuMemcpyDtoD(rows, half, MIB)) && MADE(cuMemcpyHtoDAsync(rows, host, 2 * MIB, stream)) &&
           MADE(cuMemcpyDtoHAsync(host, rows, 2 * MIB, stream)) && MADE(cuMemcpyDtoDAsync(rows, half, MIB, stream)) &&
           MADE(cuMemcpy2D(&flat)) && MADE(cuMemcpy2DUnaligned(&flat)) && MADE(cuMemcpy2DAsync(&flat, stream)) &&
           MADE(cuMemcpy3D(&deep)) && MADE(cuMemcpy3DAsync(&deep, stream));
}

static int fills(void)
{
    return MADE(cuMemsetD8(rows, 1, 2 * MIB)) && MADE(cuMemsetD16(rows, 1, MIB)) &&
           MADE(cuMemsetD32(rows, 1, MIB / 2)) && MADE(cuMemsetD2D8(rows, MIB, 1, MIB, 2)) &&
           MADE(cuMemsetD2D16(rows, MIB, 1, MIB / 2, 2)) && MADE(cuMemsetD2D32(rows, MIB, 1, MIB / 4, 2)) &&
           MADE(cuMemsetD8Async(rows, 1, 2 * MIB, stream)) && MADE(cuMemsetD16Async(rows, 1, MIB, stream)) &&
           MADE(cuMemsetD32Async(rows, 1, MIB / 2, stream)) && MADE(cuMemsetD2D8Async(rows, MIB, 1, MIB, 2, stream)) &&
           MADE(cuMemsetD2D16Async(rows, MIB, 1, MIB / 2, 2, stream)) &&
           MADE(cuMemsetD2D32Async(rows, MIB, 1, MIB / 4, 2, stream));
}

static int launches(void)
{
    CUfunction function;
    CUlaunchConfig shape = {
        .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .hStream = stream};
    return MADE(cuModuleLoadData(&module, image)) && MADE(cuModuleGetFunction(&function, module, "work")) &&
           MADE(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)) &&
           MADE(cuLaunchKernelEx(&shape, function, NULL, NULL)) &&
           MADE(cuLaunchCooperativeKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL));
}

static void run_work(void)
{
    host = calloc(2, MIB);
    if (MADE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) && MADE(cuMemAlloc(&rows, 2 * MIB)) && copies() &&
        fills() && launches())
        end_work();
}

/* --- each failure of each family */

static const struct family {
    const char *name;
    void (*run)(void);
    void (*end)(void);
} families[] = {{"plain", run_plain, end_plain},       {"mapped", run_mapped, end_mapped},
                {"ordered", run_ordered, end_ordered}, {"graph", run_graph, end_graph},
                {"capture", run_capture, end_graph},   {"array", run_array, end_array},
                {"code", run_code, end_code},          {"context", run_context, end_context},
                {"green", run_green, end_green},       {"work", run_work, end_work}};

enum { OF_DRIVER, OF_MEMORY, OF_ROOM, FAILURES };
static const char *const kinds[FAILURES] = {"of the driver", "of memory", "of room"};

struct room {
    size_t ledger, driver;
};

/* The free bytes in the ledger, when libvgpu has measured what the driver holds, and in the driver. */
static struct room room_now(void)
{
    CUstream other = NULL;
    size_t rest = 0, total;
    if (MADE(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING)))
        (void)MADE(cuStreamDestroy(other));
    (void)MADE(cuMemGetInfo(&rest, &total));
    return (struct room){rest, fail_driver_free()};
}

/* Fills the slice, so that `pages` pages of 2 MiB are free. Returns whether there are so many. */
static int fill(CUdeviceptr *filler, struct room room, int pages)
{
    size_t left = 2 * MIB * (size_t)pages;
    return room.ledger > left && MADE(cuMemAlloc(filler, room.ledger - left));
}

/* Runs the family with its n-th failure of this kind. Returns whether it has so many; *faults counts what is wrong. */
static int fails_at(const struct family *family, int kind, int n, int *faults)
{
    struct room before = room_now();
    CUdeviceptr filler = 0;
    int more = kind == OF_ROOM && fill(&filler, before, n - 1);
    allowed = kind == OF_DRIVER ? FAILURE : CUDA_ERROR_OUT_OF_MEMORY;
    wrong = NULL;
    refused = 0;
    if (kind != OF_ROOM)
        fail_next(kind == OF_DRIVER ? FAIL_CALL : FAIL_MEMORY, n);
    family->run();
    const char *failed = fail_ended();
    const char *strange = wrong;
    CUresult said = wrong_answer;
    more = kind == OF_ROOM ? more && refused > 0 : failed != NULL;
    wrong = NULL;
    allowed = CUDA_SUCCESS;
    (void)MADE(cuCtxSetCurrent(context));
    size_t driver_during = fail_driver_free();
    family->end();
    ENDED(filler, cuMemFree(filler));
    struct room after = room_now();
    int exceeds = before.driver - driver_during > before.ledger;
    int uncharged = before.driver - after.driver != before.ledger - after.ledger;
    int left = before.driver != after.driver && !(evictable && kind == OF_DRIVER);
    if (strange != NULL || wrong != NULL || uncharged || left || exceeds) {
        fprintf(stderr, "%s, failure %d %s: %s\n", family->name, n, kinds[kind], failed != NULL ? failed : "");
        if (strange != NULL)
            fprintf(stderr, "  %s: %d\n", strange, said);
        if (wrong != NULL)
            fprintf(stderr, "  at the end %s: %d\n", wrong, wrong_answer);
        fprintf(stderr, "  free: ledger %zu, then %zu; driver %zu, %zu, then %zu\n", before.ledger, after.ledger,
                before.driver, driver_during, after.driver);
        ++*faults;
    }
    return more;
}

int main(int argc, char **argv)
{
    int faults = 0;
    evictable = argc > 1 && strcmp(argv[1], "evictable") == 0;
    if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        cuCtxSetCurrent(context) != CUDA_SUCCESS)
        return 2;
    for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
        int none = 0;
        int number[FAILURES] = {0};
        fails_at(&families[i], OF_DRIVER, 1 << 30, &none); /* what the driver keeps from the first run on is measured */
        for (int kind = 0; kind < FAILURES; kind++)
            while (fails_at(&families[i], kind, number[kind] + 1, &faults))
                number[kind]++;
        printf("%s %d %d %d\n", families[i].name, number[OF_DRIVER], number[OF_MEMORY], number[OF_ROOM]);
    }
    fflush(stdout);
    getchar();
    return faults != 0;
}

/*
 * tour.c: calls both libraries in one process under sanitizers. It includes their sources, so all code is
 * instrumented, and exits 0 if every result is right. Runs on a simulated node.
 */
#include <cuda.h>
#include <nvml.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* functions that cuda.h renames, by their real names */
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t size);
CUresult cuMemFree_v2(CUdeviceptr p);
CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev);
CUresult cuCtxDestroy_v2(CUcontext ctx);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle handle, unsigned int flags);

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

enum { THREADS = 4, ROUNDS = 300, HELD = 64, SUSPENDED = 25, GREENS = 40 };
static const char ptx[] = ".version 7.8\n.target sm_80\n.visible .entry work(.param .u64 p){ret;}\n";

static CUcontext g_ctx;
static CUfunction g_function;

static void *churn(void *seed)
{
    unsigned int state = *(unsigned int *)seed;
    CUdeviceptr held[HELD] = {0};
    CUstream stream;
    CHECK(cuCtxSetCurrent(g_ctx) == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    for (int i = 0; i < ROUNDS; i++) {
        int at = rand_r(&state) % HELD;
        char byte = (char)i, back = 0;
        if (held[at] != 0)
            CHECK(cuMemFree_v2(held[at]) == CUDA_SUCCESS);
        CHECK(cuMemAlloc_v2(&held[at], 1u + (unsigned)rand_r(&state) % (8u << 20)) == CUDA_SUCCESS);
        CHECK(cuMemcpyHtoD_v2(held[at], &byte, 1) == CUDA_SUCCESS);
        CHECK(cuMemcpyDtoH_v2(&back, held[at], 1) == CUDA_SUCCESS && back == byte);
        CHECK(cuLaunchKernel(g_function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == CUDA_SUCCESS);
    }
    for (int i = 0; i < HELD; i++)
        if (held[i] != 0)
            CHECK(cuMemFree_v2(held[i]) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stream) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy(stream) == CUDA_SUCCESS);
    return NULL;
}

/* Repeatedly makes a green context under the primary context, with a texture in it. */
static void *greens(void *unused)
{
    (void)unused;
    for (int i = 0; i < GREENS; i++) {
        CUdevResource all, part;
        CUdevResourceDesc desc;
        CUgreenCtx green;
        CUcontext ctx;
        CUstream stream;
        CUevent event;
        CUarray array;
        CUtexObject texture;
        CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUDA_TEXTURE_DESC how = {.filterMode = CU_TR_FILTER_MODE_POINT};
        unsigned int count = 1;
        CHECK(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS);
        CHECK(cuDevSmResourceSplitByCount(&part, &count, &all, NULL, 0, 16) == CUDA_SUCCESS);
        CHECK(cuDevResourceGenerateDesc(&desc, &part, 1) == CUDA_SUCCESS);
        CHECK(cuGreenCtxCreate(&green, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
        CHECK(cuCtxFromGreenCtx(&ctx, green) == CUDA_SUCCESS && cuCtxSetCurrent(ctx) == CUDA_SUCCESS);
        CHECK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
        CHECK(cuEventCreate(&event, 0) == CUDA_SUCCESS && cuGreenCtxRecordEvent(green, event) == CUDA_SUCCESS);
        CHECK(cuGreenCtxWaitEvent(green, event) == CUDA_SUCCESS && cuEventDestroy_v2(event) == CUDA_SUCCESS);
        CHECK(cuArray3DCreate_v2(&array, &shape) == CUDA_SUCCESS);
        CUDA_RESOURCE_DESC of = {.resType = CU_RESOURCE_TYPE_ARRAY, .res.array.hArray = array};
        CHECK(cuTexObjectCreate(&texture, &of, &how, NULL) == CUDA_SUCCESS);
        CHECK(cuTexObjectDestroy(texture) == CUDA_SUCCESS && cuArrayDestroy(array) == CUDA_SUCCESS);
        CHECK(cuGreenCtxDestroy(green) == CUDA_SUCCESS);
        CHECK(cuCtxSetCurrent(NULL) == CUDA_SUCCESS);
        CHECK(cuStreamQuery(stream) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    return NULL;
}

/* Suspends and resumes this process while its other threads work. */
static void *suspend(void *unused)
{
    int pid = (int)getpid();
    CUprocessState state;
    (void)unused;
    for (int i = 0; i < SUSPENDED; i++) {
        CHECK(cuCheckpointProcessLock(pid, NULL) == CUDA_SUCCESS);
        CHECK(cuCheckpointProcessCheckpoint(pid, NULL) == CUDA_SUCCESS);
        CHECK(cuCheckpointProcessGetState(pid, &state) == CUDA_SUCCESS);
        CHECK(state == CU_PROCESS_STATE_CHECKPOINTED);
        CHECK(cuCheckpointProcessRestore(pid, NULL) == CUDA_SUCCESS);
        CHECK(cuCheckpointProcessUnlock(pid, NULL) == CUDA_SUCCESS);
    }
    return NULL;
}

static void tour_shared(void)
{
    CUdeviceptr p;
    CUipcMemHandle memory, wrong = {{0}};
    CUipcEventHandle handle;
    CUevent event;
    CHECK(cuMemAlloc_v2(&p, 1000) == CUDA_SUCCESS);
    CHECK(cuIpcGetMemHandle(&memory, p) == CUDA_SUCCESS);
    CHECK(cuIpcOpenMemHandle_v2(&p, wrong, 1) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(cuCheckpointProcessLock((int)getpid(), NULL) == CUDA_SUCCESS);
    CHECK(cuCheckpointProcessUnlock((int)getpid(), NULL) == CUDA_SUCCESS);
    CHECK(cuMemFree_v2(p) == CUDA_SUCCESS);
    CHECK(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    CHECK(cuIpcGetEventHandle(&handle, event) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, NULL) == CUDA_SUCCESS && cuEventSynchronize(event) == CUDA_SUCCESS);
    CHECK(cuEventDestroy_v2(event) == CUDA_SUCCESS);
}

static void tour_descriptors(void)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemoryPool pool, taken;
    CUmemPoolPtrExportData data;
    CUmemGenericAllocationHandle made;
    CUdeviceptr p, q;
    CUexternalMemory external;
    char byte = 7, back = 0;
    int fd;
    CHECK(cuMemPoolCreate(&pool, &props) == CUDA_SUCCESS);
    CHECK(cuMemAllocFromPoolAsync(&p, 5000, pool, NULL) == CUDA_SUCCESS);
    CHECK(cuMemPoolExportToShareableHandle(&fd, pool, props.handleTypes, 0) == CUDA_SUCCESS);
    CHECK(cuMemPoolExportPointer(&data, p) == CUDA_SUCCESS);
    CHECK(cuMemPoolImportFromShareableHandle(&taken, (void *)(intptr_t)fd, props.handleTypes, 0) == CUDA_SUCCESS);
    CHECK(close(fd) == 0 && cuMemPoolImportPointer(&q, taken, &data) == CUDA_SUCCESS);
    CHECK(cuMemcpyHtoD_v2(p, &byte, 1) == CUDA_SUCCESS && cuMemcpyDtoH_v2(&back, q, 1) == CUDA_SUCCESS && back == 7);
    CHECK(cuMemPoolDestroy(taken) == CUDA_SUCCESS && cuMemPoolDestroy(pool) == CUDA_SUCCESS);
    CHECK(cuMemCreate(&made, 2 << 20, &prop, 0) == CUDA_SUCCESS);
    CHECK(cuMemExportToShareableHandle(&fd, made, prop.requestedHandleTypes, 0) == CUDA_SUCCESS);
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC of = {
        .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle = {.fd = fd}, .size = 2 << 20};
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC part = {.offset = 4096, .size = 4096};
    CHECK(cuImportExternalMemory(&external, &of) == CUDA_SUCCESS);
    CHECK(cuExternalMemoryGetMappedBuffer(&p, external, &part) == CUDA_SUCCESS);
    CHECK(cuMemcpyHtoD_v2(p, &byte, 1) == CUDA_SUCCESS && cuMemFree_v2(p) == CUDA_SUCCESS);
    CHECK(cuDestroyExternalMemory(external) == CUDA_SUCCESS && cuMemRelease(made) == CUDA_SUCCESS);
}

static void tour_cuda(void)
{
    CUmodule module;
    size_t before, after, total;
    pthread_t threads[THREADS], suspender, green[2];
    unsigned int seeds[THREADS];
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuCtxCreate_v2(&g_ctx, 0, 0) == CUDA_SUCCESS);
    CHECK(cuModuleLoadData(&module, ptx) == CUDA_SUCCESS);
    CHECK(cuModuleGetFunction(&g_function, module, "work") == CUDA_SUCCESS);
    CHECK(cuMemGetInfo_v2(&before, &total) == CUDA_SUCCESS);
    for (unsigned int i = 0; i < THREADS; i++) {
        seeds[i] = i + 1;
        CHECK(pthread_create(&threads[i], NULL, churn, &seeds[i]) == 0);
    }
    CHECK(pthread_create(&suspender, NULL, suspend, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&green[i], NULL, greens, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_join(suspender, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(green[i], NULL);
    tour_shared();
    tour_descriptors();
    CHECK(cuMemGetInfo_v2(&after, &total) == CUDA_SUCCESS && before == after);
    CHECK(cuModuleUnload(module) == CUDA_SUCCESS);
    CHECK(cuCtxDestroy_v2(g_ctx) == CUDA_SUCCESS);
}

static void tour_nvml(void)
{
    nvmlDevice_t device;
    nvmlGpuInstance_t gi;
    nvmlComputeInstance_t ci;
    nvmlReturn_t status;
    char text[96];
    nvmlProcessInfo_t processes[4];
    unsigned int count = 4;
    CHECK(nvmlInit_v2() == NVML_SUCCESS);
    CHECK(nvmlDeviceGetHandleByIndex_v2(1, &device) == NVML_SUCCESS);
    CHECK(nvmlDeviceGetName(device, text, sizeof(text)) == NVML_SUCCESS);
    CHECK(nvmlDeviceGetName(device, text, 3) == NVML_ERROR_INSUFFICIENT_SIZE);
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(device, &count, processes) == NVML_SUCCESS);
    CHECK(nvmlDeviceSetMigMode(device, 1, &status) == NVML_SUCCESS && status == NVML_SUCCESS);
    for (int i = 0; i < 7; i++) {
        CHECK(nvmlDeviceCreateGpuInstance(device, 19, &gi) == NVML_SUCCESS);
        CHECK(nvmlGpuInstanceCreateComputeInstance(gi, 0, &ci) == NVML_SUCCESS);
    }
    CHECK(nvmlDeviceCreateGpuInstance(device, 19, &gi) == NVML_ERROR_INSUFFICIENT_RESOURCES);
    CHECK(nvmlGpuInstanceDestroy(gi) == NVML_ERROR_IN_USE);
    CHECK(nvmlDeviceGetName((nvmlDevice_t)&count, text, sizeof(text)) == NVML_ERROR_INVALID_ARGUMENT);
    CHECK(nvmlShutdown() == NVML_SUCCESS);
    CHECK(nvmlDeviceGetName(device, text, sizeof(text)) == NVML_ERROR_UNINITIALIZED);
}

int main(void)
{
    tour_cuda();
    tour_nvml();
    puts("toured");
    return 0;
}

/*
 * fake_cuda.c: a libcuda.so.1 for tests of the limiter alone. Two devices; allocations are numbers.
 * It is the oracle: with FAKE_STATE set, every byte that reaches the driver is counted, by device, in a
 * file shared by all processes, with the highest total ever seen. It has no limit but FAKE_CARD_BYTES.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define DEVICES 2
#define CONTEXT_BYTES (64ull << 20)
#define CARD_BYTES (8ull << 30)
#define RECORDS 65536

struct state { /* read by the tests as unsigned 64-bit words */
    uint64_t now[DEVICES];
    uint64_t most[DEVICES];
    uint64_t calls;
};

struct record {
    uint64_t handle;
    uint64_t bytes;
    int device;
    unsigned char fill;
};

static struct state private_state;
static struct state *state = &private_state;
static struct record records[RECORDS];
static uint64_t own_bytes[DEVICES];
static uint64_t next_handle = 0x7f0000000000;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int ready;
static unsigned primary_refs[DEVICES];
static __thread CUcontext current;
static int contexts[DEVICES]; /* their addresses are the context handles */

static int device_of(CUcontext context)
{
    return (int)((int *)context - contexts);
}

static void count(int device, uint64_t bytes)
{
    uint64_t now = __atomic_add_fetch(&state->now[device], bytes, __ATOMIC_SEQ_CST);
    uint64_t most = __atomic_load_n(&state->most[device], __ATOMIC_SEQ_CST);
    own_bytes[device] += bytes;
    while (now > most && !__atomic_compare_exchange_n(&state->most[device], &most, now, 0, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST))
        continue;
}

static void uncount(int device, uint64_t bytes)
{
    __atomic_sub_fetch(&state->now[device], bytes, __ATOMIC_SEQ_CST);
    own_bytes[device] -= bytes;
}

static struct record *find(uint64_t handle)
{
    for (uint64_t i = handle >> 12, n = 0; n < RECORDS; i++, n++) {
        if (records[i % RECORDS].handle == handle)
            return &records[i % RECORDS];
    }
    return NULL;
}

/* The process dies inside the driver, between the limiter's reservation and its settlement. */
static void die_if_asked(void)
{
    static int calls;
    const char *at = getenv("FAKE_DIE_AT_CALL");
    if (at != NULL && ++calls == atoi(at))
        raise(SIGKILL);
}

static CUresult make(int device, uint64_t bytes, uint64_t *handle)
{
    const char *card = getenv("FAKE_CARD_BYTES");
    if (bytes == 0 || handle == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    state->calls++;
    die_if_asked();
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (own_bytes[device] + bytes <= (card != NULL ? strtoull(card, NULL, 10) : CARD_BYTES)) {
        *handle = next_handle += 4096;
        for (uint64_t i = *handle >> 12;; i++)
            if (records[i % RECORDS].handle == 0) {
                records[i % RECORDS] = (struct record){*handle, bytes, device, 0};
                break;
            }
        count(device, bytes);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static CUresult drop(uint64_t handle)
{
    pthread_mutex_lock(&mutex);
    struct record *record = handle != 0 ? find(handle) : NULL;
    if (record != NULL) {
        uncount(record->device, record->bytes);
        record->handle = 0;
    }
    pthread_mutex_unlock(&mutex);
    return record != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define NEED_CONTEXT                          \
    if (!ready)                               \
        return CUDA_ERROR_NOT_INITIALIZED;    \
    if (current == NULL)                      \
        return CUDA_ERROR_INVALID_CONTEXT;

API uint64_t fake_cuda_process_bytes(int device)
{
    return own_bytes[device];
}

API CUresult cuInit(unsigned int flags)
{
    const char *path = getenv("FAKE_STATE");
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (path != NULL && state == &private_state) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *mapped = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (mapped == MAP_FAILED)
            return CUDA_ERROR_UNKNOWN;
        state = mapped;
    }
    ready = 1;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = error == CUDA_SUCCESS                  ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_OUT_OF_MEMORY    ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_NOT_PERMITTED    ? "CUDA_ERROR_NOT_PERMITTED"
            : error == CUDA_ERROR_NOT_SUPPORTED    ? "CUDA_ERROR_NOT_SUPPORTED"
            : error == CUDA_ERROR_OPERATING_SYSTEM ? "CUDA_ERROR_OPERATING_SYSTEM"
                                                   : "CUDA_ERROR_OTHER";
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *number) { *number = DEVICES; return CUDA_SUCCESS; }

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    *device = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    snprintf(name, (size_t)size, "fake %d", device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    memset(uuid->bytes, 0, 16);
    uuid->bytes[15] = (char)(device + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = CARD_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (!ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (getenv("FAKE_DIE_IN_CONTEXT") != NULL)
        raise(SIGKILL);
    if (primary_refs[device]++ == 0)
        count(device, CONTEXT_BYTES);
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}

static void end_primary(CUdevice device)
{
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < RECORDS; i++)
        if (records[i].handle != 0 && records[i].device == device) {
            uncount(device, records[i].bytes);
            records[i].handle = 0;
        }
    uncount(device, CONTEXT_BYTES);
    pthread_mutex_unlock(&mutex);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    if (primary_refs[device] == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary_refs[device] == 0)
        end_primary(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

API CUresult cuCtxGetDevice(CUdevice *device)
{
    NEED_CONTEXT
    *device = device_of(current);
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) { current = context; return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { *context = current; current = NULL; return CUDA_SUCCESS; }

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    NEED_CONTEXT
    if (free_bytes != NULL)
        *free_bytes = CARD_BYTES - own_bytes[device_of(current)];
    if (total != NULL)
        *total = CARD_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    NEED_CONTEXT
    return make(device_of(current), bytes, (uint64_t *)pointer);
}

API CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    (void)pointer;
    (void)bytes;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    NEED_CONTEXT
    *pitch = (width + 1023) & ~1023ul; /* coarser than the limiter's guess, so that it must adjust */
    return make(device_of(current), *pitch * height, (uint64_t *)pointer);
}

API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    return cuMemAlloc_v2(pointer, bytes);
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) { return pointer == 0 ? CUDA_SUCCESS : drop(pointer); }

#undef cuMemAllocAsync
#undef cuMemFreeAsync
API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    (void)stream;
    return cuMemAlloc_v2(pointer, bytes);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    (void)stream;
    return drop(pointer);
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    (void)flags;
    return make(prop->location.id, bytes, (uint64_t *)handle);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return drop(handle); }

API CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    (void)pointer, (void)bytes, (void)offset, (void)flags;
    return find(handle) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    (void)pointer, (void)bytes;
    return CUDA_SUCCESS;
}

API CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    NEED_CONTEXT
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return make(device_of(current), shape->Width * 4 * shape->NumChannels * (shape->Height ? shape->Height : 1),
                (uint64_t *)array);
}

API CUresult cuArrayDestroy(CUarray array) { return drop((uint64_t)(uintptr_t)array); }

API CUresult cuMemsetD8_v2(CUdeviceptr pointer, unsigned char value, size_t bytes)
{
    struct record *record = find(pointer);
    (void)bytes;
    if (record == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    record->fill = value;
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    struct record *record = find(from);
    if (record == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memset(to, record->fill, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)image; return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)name;
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

#undef cuLaunchKernel
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void **parameters, void **extra)
{
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    return CUDA_SUCCESS;
}

API CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t number,
                                    CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    (void)node, (void)graph, (void)dependencies, (void)number, (void)parameters;
    return CUDA_SUCCESS;
}

/* As the driver does it: the base name and a version give the newest variant of that version. */
API CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status)
{
    static const struct { const char *name; int since; void *function; } table[] = {
        {"cuInit", 2000, cuInit}, {"cuGetErrorName", 6000, cuGetErrorName},
        {"cuGetProcAddress", 12000, cuGetProcAddress_v2}, {"cuDeviceGetCount", 2000, cuDeviceGetCount},
        {"cuDeviceGet", 2000, cuDeviceGet}, {"cuDeviceGetName", 2000, cuDeviceGetName},
        {"cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2}, {"cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2},
        {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
        {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2},
        {"cuCtxSetCurrent", 4000, cuCtxSetCurrent}, {"cuCtxSynchronize", 2000, cuCtxSynchronize},
        {"cuMemGetInfo", 3020, cuMemGetInfo_v2}, {"cuMemAlloc", 3020, cuMemAlloc_v2}, {"cuMemAlloc", 2000, cuMemAlloc},
        {"cuMemAllocPitch", 3020, cuMemAllocPitch_v2}, {"cuMemAllocManaged", 6000, cuMemAllocManaged},
        {"cuMemAllocAsync", 11020, cuMemAllocAsync}, {"cuMemFreeAsync", 11020, cuMemFreeAsync},
        {"cuMemCreate", 10020, cuMemCreate}, {"cuMemRelease", 10020, cuMemRelease},
        {"cuArrayCreate", 3020, cuArrayCreate_v2}, {"cuArrayDestroy", 2000, cuArrayDestroy},
        {"cuMemFree", 3020, cuMemFree_v2}, {"cuMemsetD8", 3020, cuMemsetD8_v2},
        {"cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2}, {"cuModuleLoadData", 2000, cuModuleLoadData},
        {"cuModuleGetFunction", 2000, cuModuleGetFunction}, {"cuLaunchKernel", 4000, cuLaunchKernel}};
    (void)flags;
    if (symbol == NULL || address == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]) && *address == NULL; i++)
        if (strcmp(table[i].name, symbol) == 0 && table[i].since <= version)
            *address = table[i].function;
    if (status != NULL)
        *status = *address != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *address != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

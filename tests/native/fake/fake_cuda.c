/*
 * fake_cuda.c: a libcuda.so.1 for tests of libvgpu alone, with two devices. Allocations are numbers without memory. It
 * is the tests' oracle: with FAKE_STATE it counts the bytes that reach the driver, by device, in a file that all
 * processes share, with the highest total. Its only limit is FAKE_CARD_BYTES. With FAKE_LEDGER (a lease's `usage`) it
 * compares each change on device 0 with the process's own slot, once the process has a slot. FAKE_LINGER_US is the
 * time that a freeing call takes before the memory is free.
 */
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "lease.h"

#define RECORDS 65536
#define PAGES 4096 /* pages that small allocations share */
#define MAPPINGS 256

struct state { /* counters that the tests read as unsigned 64-bit words */
    uint64_t now[DEVICES];
    uint64_t most[DEVICES];
    uint64_t calls;
    uint64_t uncounted; /* on devices[0]: the most bytes that one process held in excess of what its slot counted */
};

struct record {
    uint64_t handle;
    uint64_t bytes; /* bytes in whole pages; 0 if the allocation shares `page` */
    struct page *page;
    int device;
    int mappings; /* mappings of the memory, which keep it after the handle is released */
    unsigned char released;
    unsigned char managed;
    unsigned char fill;
};

struct page {
    uint64_t base; /* first address of the range; 0: the entry is not in use */
    uint64_t next; /* offset of the next allocation in the range */
    int device;
    int live;
};

static struct page pages[PAGES];
static struct {
    uint64_t at, bytes, handle;
} mappings[MAPPINGS];
static uint64_t hidden_bytes[DEVICES]; /* managed memory, which NVML does not show */

static struct state private_state;
static struct state *state = &private_state;
static struct record records[RECORDS];
static uint64_t own_bytes[DEVICES];
static uint64_t next_page = 0x7f0000000000;
pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;
static int ready;
static unsigned primary_refs[DEVICES];
__thread CUcontext fake_current;
static int contexts[DEVICES]; /* the address of an element is the handle of the device's context */

int fake_device(void)
{
    return (int)((int *)fake_current - contexts);
}

int fake_no_context(void)
{
    return !ready ? CUDA_ERROR_NOT_INITIALIZED : fake_current == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

/* Maps the file and never closes it, because closing `usage` anywhere in the process would drop its lock. */
static void *map_file(const char *path, size_t size)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return mapped != MAP_FAILED ? mapped : NULL;
}

/* Returns the slot of this process in the `usage` file that FAKE_LEDGER names, or NULL if there is none yet. */
static struct vgpu_slot *own_slot(void)
{
    static struct vgpu_usage *usage;
    const char *path = getenv("FAKE_LEDGER");
    if (usage == NULL && path != NULL)
        usage = map_file(path, sizeof(*usage));
    for (unsigned i = 0; usage != NULL && i < VGPU_MAX_SLOTS; i++)
        if (usage->slots[i].owner != 0 && usage->slots[i].pid == getpid())
            return &usage->slots[i];
    return NULL;
}

/* Records by how many bytes this process's memory in use on device 0 exceeds what its slot charges. */
static void compare_with_ledger(int device)
{
    const struct vgpu_slot *slot = own_slot();
    if (slot == NULL || device != 0)
        return;
    const struct vgpu_slot_device *own = &slot->devices[0];
    uint64_t ledger = own->claim_bytes + own->used_bytes + own->context_bytes;
    uint64_t excess = own_bytes[0] > ledger ? own_bytes[0] - ledger : 0;
    uint64_t seen = __atomic_load_n(&state->uncounted, __ATOMIC_SEQ_CST);
    while (excess > seen &&
           !__atomic_compare_exchange_n(&state->uncounted, &seen, excess, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        continue;
}

void fake_linger(int device)
{
    const char *how_long = getenv("FAKE_LINGER_US");
    compare_with_ledger(device);
    if (how_long != NULL)
        usleep((useconds_t)atoi(how_long));
}

void fake_count(int device, uint64_t bytes)
{
    uint64_t now = __atomic_add_fetch(&state->now[device], bytes, __ATOMIC_SEQ_CST);
    uint64_t most = __atomic_load_n(&state->most[device], __ATOMIC_SEQ_CST);
    own_bytes[device] += bytes;
    while (now > most &&
           !__atomic_compare_exchange_n(&state->most[device], &most, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        continue;
    compare_with_ledger(device);
}

void fake_uncount(int device, uint64_t bytes)
{
    fake_linger(device);
    __atomic_sub_fetch(&state->now[device], bytes, __ATOMIC_SEQ_CST);
    own_bytes[device] -= bytes;
}

static struct record *find(uint64_t handle)
{
    for (uint64_t i = handle >> 9, n = 0; n < RECORDS; i++, n++) {
        if (records[i % RECORDS].handle == handle)
            return &records[i % RECORDS];
    }
    return NULL;
}

/* Kills the process inside the driver's call, when libvgpu has reserved the memory and not yet settled the charge. */
static void die_if_asked(void)
{
    static int calls;
    const char *at = getenv("FAKE_DIE_AT_CALL");
    if (at != NULL && ++calls == atoi(at))
        raise(SIGKILL);
}

bool fake_has_room(int device, uint64_t bytes)
{
    const char *card = getenv("FAKE_CARD_BYTES");
    return own_bytes[device] + bytes <= (card != NULL ? strtoull(card, NULL, 10) : CARD_BYTES);
}

static struct record *new_record(uint64_t handle)
{
    for (uint64_t i = handle >> 9;; i++)
        if (records[i % RECORDS].handle == 0) {
            records[i % RECORDS] = (struct record){.handle = handle};
            return &records[i % RECORDS];
        }
}

/* Small allocations share pages of 2 MiB, as on a real device. */
static struct record *make_small(int device, uint64_t bytes)
{
    struct page *page = NULL;
    for (int i = 0; i < PAGES && page == NULL; i++)
        if (pages[i].base != 0 && pages[i].device == device && pages[i].next + bytes <= PAGE_BYTES)
            page = &pages[i];
    if (page == NULL) {
        if (!fake_has_room(device, PAGE_BYTES))
            return NULL;
        for (int i = 0; i < PAGES && page == NULL; i++)
            if (pages[i].base == 0)
                page = &pages[i];
        *page = (struct page){.base = next_page, .device = device};
        next_page += PAGE_BYTES;
        fake_count(device, PAGE_BYTES);
    }
    struct record *record = new_record(page->base + page->next);
    record->page = page;
    record->device = device;
    page->next += (bytes + 511) & ~511ull;
    page->live++;
    return record;
}

static struct record *make_large(int device, uint64_t bytes)
{
    uint64_t whole = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (whole < bytes || !fake_has_room(device, whole))
        return NULL;
    struct record *record = new_record(next_page);
    next_page += whole;
    record->bytes = whole;
    record->device = device;
    fake_count(device, whole);
    return record;
}

static CUresult make(int device, uint64_t bytes, uint64_t *handle)
{
    if (bytes == 0 || handle == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    state->calls++;
    die_if_asked();
    struct record *record = bytes <= PAGE_BYTES / 2 ? make_small(device, bytes) : make_large(device, bytes);
    if (record != NULL)
        *handle = record->handle;
    pthread_mutex_unlock(&fake_mutex);
    return record != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The caller holds the mutex. */
static void end_record(struct record *record)
{
    struct page *page = record->page;
    if (record->managed)
        hidden_bytes[record->device] -= record->bytes;
    if (record->bytes > 0)
        fake_uncount(record->device, record->bytes);
    if (page != NULL && --page->live == 0) {
        fake_uncount(page->device, PAGE_BYTES);
        page->base = 0;
    }
    record->handle = 0;
}

static CUresult drop(uint64_t handle)
{
    pthread_mutex_lock(&fake_mutex);
    struct record *record = handle != 0 ? find(handle) : NULL;
    if (record != NULL && record->released)
        record = NULL;
    if (record != NULL) {
        record->released = 1;
        if (record->mappings == 0)
            end_record(record);
    }
    pthread_mutex_unlock(&fake_mutex);
    return record != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API uint64_t fake_cuda_process_bytes(int device); /* fake_nvml.c calls this */
API uint64_t fake_cuda_process_bytes(int device)
{
    return own_bytes[device] - hidden_bytes[device];
}

/* A forked child has no state in the driver: no contexts and no allocations. */
static void forget(void)
{
    ready = 0;
    fake_current = NULL;
    memset(primary_refs, 0, sizeof(primary_refs));
    memset(own_bytes, 0, sizeof(own_bytes));
    memset(hidden_bytes, 0, sizeof(hidden_bytes));
    memset(records, 0, sizeof(records));
    memset(pages, 0, sizeof(pages));
    pthread_mutex_init(&fake_mutex, NULL);
}

API CUresult cuInit(unsigned int flags)
{
    const char *path = getenv("FAKE_STATE");
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (path != NULL && state == &private_state) {
        state = map_file(path, sizeof(*state));
        if (state == NULL)
            abort();
    }
    if (!ready)
        pthread_atfork(NULL, NULL, forget);
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

API CUresult cuDeviceGetCount(int *number)
{
    *number = DEVICES;
    return CUDA_SUCCESS;
}

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
        fake_count(device, CONTEXT_BYTES);
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}

static void end_primary(CUdevice device)
{
    pthread_mutex_lock(&fake_mutex);
    for (int i = 0; i < RECORDS; i++)
        if (records[i].handle != 0 && records[i].device == device)
            end_record(&records[i]);
    fake_uncount(device, CONTEXT_BYTES);
    pthread_mutex_unlock(&fake_mutex);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    if (primary_refs[device] == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary_refs[device] == 0)
        end_primary(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    fake_current = context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = fake_current;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    NEED_CONTEXT
    *device = fake_device();
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    fake_current = context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    *context = fake_current;
    fake_current = NULL;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    NEED_CONTEXT
    if (free_bytes != NULL)
        *free_bytes = CARD_BYTES - own_bytes[fake_device()];
    if (total != NULL)
        *total = CARD_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    NEED_CONTEXT
    return make(fake_device(), bytes, (uint64_t *)pointer);
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
    *pitch = (width + 1023) & ~1023ul; /* larger than libvgpu's estimate, so libvgpu must correct its charge */
    return make(fake_device(), *pitch * height, (uint64_t *)pointer);
}

API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    NEED_CONTEXT
    CUresult result = make(fake_device(), bytes <= PAGE_BYTES ? PAGE_BYTES : bytes, (uint64_t *)pointer);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&fake_mutex);
        find(*pointer)->managed = 1;
        hidden_bytes[fake_device()] += find(*pointer)->bytes;
        pthread_mutex_unlock(&fake_mutex);
    }
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    return pointer == 0 || fake_pool_free(pointer) ? CUDA_SUCCESS : drop(pointer);
}

CUresult fake_drop(uint64_t handle)
{
    return drop(handle);
}

static uint64_t due[64];

void fake_drop_later(uint64_t handle)
{
    for (int i = 0; i < 64; i++)
        if (due[i] == 0) {
            due[i] = handle;
            return;
        }
    abort();
}

void fake_drop_due(void)
{
    for (int i = 0; i < 64; i++)
        if (due[i] != 0) {
            drop(due[i]);
            due[i] = 0;
        }
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    (void)flags;
    return make(prop->location.id, bytes, (uint64_t *)handle);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    return drop(handle);
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    (void)offset, (void)flags;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    struct record *record = find(handle);
    for (int i = 0; i < MAPPINGS && record != NULL && result != CUDA_SUCCESS; i++)
        if (mappings[i].at == 0) {
            mappings[i].at = pointer;
            mappings[i].bytes = bytes;
            mappings[i].handle = handle;
            record->mappings++;
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&fake_mutex);
    return result;
}

API CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    pthread_mutex_lock(&fake_mutex);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].at >= pointer && mappings[i].at < pointer + bytes && mappings[i].at != 0) {
            struct record *record = find(mappings[i].handle);
            mappings[i].at = 0;
            if (--record->mappings == 0 && record->released)
                end_record(record);
        }
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    NEED_CONTEXT
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return make(fake_device(), shape->Width * 4 * shape->NumChannels * (shape->Height ? shape->Height : 1),
                (uint64_t *)array);
}

API CUresult cuArrayDestroy(CUarray array)
{
    return drop((uint64_t)(uintptr_t)array);
}

API CUresult cuMemsetD8_v2(CUdeviceptr pointer, unsigned char value, size_t bytes)
{
    struct record *record = find(pointer);
    (void)bytes;
    if (record == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    record->fill = value;
    return CUDA_SUCCESS;
}

API CUresult cuMemsetD2D8_v2(CUdeviceptr pointer, size_t pitch, unsigned char value, size_t width, size_t height)
{
    return cuMemsetD8_v2(pointer, value, pitch * height + width);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    struct record *record = find(from);
    if (record == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memset(to, record->fill, bytes);
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

/* Stands for a driver function without a symbol, which can be got only from cuGetProcAddress. */
static CUresult private_entry(void)
{
    return CUDA_SUCCESS;
}

/* The variant of private_entry() in CUDA 14, which has one more argument. */
static CUresult private_entry_of_14(void)
{
    return CUDA_SUCCESS;
}

/* As in NVIDIA's driver, the base name and a version select the newest variant up to that version. */
API CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status)
{
    static const struct {
        const char *name;
        int since;
        void *function;
    } table[] = {{"cuInit", 2000, cuInit},
                 {"cuGetErrorName", 6000, cuGetErrorName},
                 {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
                 {"cuDeviceGetCount", 2000, cuDeviceGetCount},
                 {"cuDeviceGet", 2000, cuDeviceGet},
                 {"cuDeviceGetName", 2000, cuDeviceGetName},
                 {"cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2},
                 {"cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2},
                 {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
                 {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2},
                 {"cuCtxSetCurrent", 4000, cuCtxSetCurrent},
                 {"cuCtxSynchronize", 2000, cuCtxSynchronize},
                 {"cuMemGetInfo", 3020, cuMemGetInfo_v2},
                 {"cuMemAlloc", 3020, cuMemAlloc_v2},
                 {"cuMemAlloc", 2000, cuMemAlloc},
                 {"cuMemAllocPitch", 3020, cuMemAllocPitch_v2},
                 {"cuMemAllocManaged", 6000, cuMemAllocManaged},
                 {"cuMemAllocAsync", 11020, cuMemAllocAsync},
                 {"cuMemFreeAsync", 11020, cuMemFreeAsync},
                 {"cuMemCreate", 10020, cuMemCreate},
                 {"cuMemRelease", 10020, cuMemRelease},
                 {"cuArrayCreate", 3020, cuArrayCreate_v2},
                 {"cuArrayDestroy", 2000, cuArrayDestroy},
                 {"cuMemFree", 3020, cuMemFree_v2},
                 {"cuStreamSynchronize", 2000, cuStreamSynchronize},
                 {"cuMemsetD8", 3020, cuMemsetD8_v2},
                 {"cuMemsetD2D8", 3020, cuMemsetD2D8_v2},
                 {"cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2},
                 {"cuModuleLoadData", 2000, cuModuleLoadData},
                 {"cuModuleGetFunction", 2000, cuModuleGetFunction},
                 {"cuLaunchKernel", 4000, cuLaunchKernel}};
    (void)flags;
    if (symbol == NULL || address == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]) && *address == NULL; i++)
        if (strcmp(table[i].name, symbol) == 0 && table[i].since <= version)
            *address = table[i].function;
    if (*address != NULL && getenv("FAKE_PRIVATE_ENTRIES") != NULL)
        *address = version >= 14000 && strcmp(symbol, "cuMemsetD8") == 0 ? (void *)private_entry_of_14
                                                                         : (void *)private_entry;
    if (status != NULL)
        *status = *address != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *address != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

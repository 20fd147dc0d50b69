/*
 * pool.c: stream-ordered allocations and memory pools. The most by which a request can enlarge its pool is claimed
 * before the driver's call; afterwards the pool's own figure is charged. So libvgpu needs no record of each pointer,
 * and a free costs nothing.
 */
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "suspended.h"
#include "capture.h"
#include "charge.h"
#include "device.h"
#include "functions.h"
#include "graph_memory.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "evictable.h"
#include "source.h"
#include "swap.h"
#include "tenant.h"

#define KNOWN_BLOCKS 64u /* a power of two */

struct pool {
    CUmemoryPool handle;
    int device;       /* index of the device in the lease */
    bool unseen;      /* the pool has managed memory, which NVML does not count for the process */
    uint64_t charged; /* bytes charged for the pool; `mutex` guards writes */
    pthread_mutex_t mutex;
    struct pool *next;
    uint64_t shrinks;             /* number of times that the charge decreased; `mutex` guards writes */
    uint64_t known[KNOWN_BLOCKS]; /* block_word() of blocks whose memory is charged */
};

static struct pool *pools; /* list of known pools; guarded by `list` */
static pthread_mutex_t list = PTHREAD_MUTEX_INITIALIZER;
/* for each device, the pool that cuMemAllocAsync uses; NULL: libvgpu must ask the driver */
static struct pool *current[VGPU_MAX_DEVICES];
static uint32_t holding; /* 1: a pool has been charged */

/*
 * Reads an attribute of a pool. This call is unsafe during a capture, as is cuMemPoolTrimTo: it invalidates a capture
 * that this thread began on another stream. So libvgpu makes both calls in relaxed mode.
 */
static uint64_t attribute(CUmemoryPool pool, CUmemPool_attribute which, uint64_t otherwise)
{
    cuuint64_t value = 0;
    int mode = vgpu_capture_relax_if_any();
    CUresult result = CALL(cuMemPoolGetAttribute, pool, which, &value);
    vgpu_capture_restore_if_any(mode);
    return result == CUDA_SUCCESS ? value : otherwise;
}

/* Returns the bytes that the driver holds for the pool; if it does not report them, the bytes charged. */
static uint64_t reserved_by(const struct pool *pool)
{
    return attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                     __atomic_load_n(&pool->charged, __ATOMIC_RELAXED));
}

/*
 * Charges the pool's present size. If the pool has shrunk, first makes its known blocks unknown (`shrinks`), and then
 * reads the size again: an allocation that found its block known before that has already enlarged the pool.
 */
static void charge_size(struct pool *pool)
{
    struct vgpu_account *account = vgpu_tenant_account();
    pthread_mutex_lock(&pool->mutex);
    uint64_t before = pool->charged;
    uint64_t reserved = reserved_by(pool);
    if (reserved < before) {
        __atomic_add_fetch(&pool->shrinks, 1, __ATOMIC_SEQ_CST);
        reserved = reserved_by(pool);
    }
    if (reserved > before)
        vgpu_account_add(account, (unsigned)pool->device, reserved - before);
    else if (reserved < before)
        vgpu_account_release(account, (unsigned)pool->device, before - reserved);
    if (pool->unseen)
        vgpu_overhead_unseen(pool->device, (int64_t)(reserved - before));
    if (before == 0 && reserved > 0)
        __atomic_store_n(&holding, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->charged, reserved, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&pool->mutex);
    vgpu_overhead_changed();
}

/* Charges the pool's present size. Returns true if it had not changed. */
static bool settle(struct pool *pool)
{
    if (reserved_by(pool) == __atomic_load_n(&pool->charged, __ATOMIC_RELAXED))
        return true;
    charge_size(pool);
    return false;
}

/* Returns a word that is very probably different for each block, and for the same block after the pool has shrunk. */
static uint64_t block_word(const struct pool *pool, CUdeviceptr pointer, uint64_t bytes)
{
    uint64_t shrinks = __atomic_load_n(&pool->shrinks, __ATOMIC_SEQ_CST);
    return (uint64_t)pointer * 0x9e3779b97f4a7c15u ^ bytes * 0xc2b2ae3d27d4eb4fu ^ (shrinks + 1) * 0x165667b19e3779f9u;
}

/*
 * Charges what an allocation added to its pool. A block that the pool handed out before, and that was charged then, adds
 * nothing, unless the pool has shrunk since. For such a block the driver is not asked for the pool's size, which would
 * take 28 ns on an H200.
 */
static void settle_block(struct pool *pool, CUdeviceptr pointer, uint64_t bytes)
{
    uint64_t word = block_word(pool, pointer, bytes);
    uint64_t *known = &pool->known[word >> 32 & (KNOWN_BLOCKS - 1)];
    if (__atomic_load_n(known, __ATOMIC_RELAXED) == word)
        return;
    settle(pool);
    __atomic_store_n(known, word, __ATOMIC_RELAXED);
}

static struct pool *find(CUmemoryPool handle)
{
    struct vgpu_entry entry;
    return vgpu_table_get(VGPU_KIND_POOL, (uint64_t)(uintptr_t)handle, &entry) ? entry.owner : NULL;
}

/*
 * Returns the record of a pool, made at its first use; NULL if there is no memory for it, or the device is not in the
 * lease.
 */
static struct pool *note(CUmemoryPool handle, int device, bool unseen)
{
    if (device == VGPU_NOT_IN_LEASE)
        return NULL;
    pthread_mutex_lock(&list);
    struct pool *pool = find(handle);
    if (pool == NULL && (pool = calloc(1, sizeof(*pool))) != NULL) {
        *pool = (struct pool){.handle = handle, .device = device, .unseen = unseen, .next = pools};
        pthread_mutex_init(&pool->mutex, NULL);
        struct vgpu_entry entry = {.kind = VGPU_KIND_POOL, .key = (uint64_t)(uintptr_t)handle, .owner = pool};
        if (vgpu_table_put(&entry)) {
            pools = pool;
        } else {
            free(pool);
            pool = NULL;
        }
    }
    pthread_mutex_unlock(&list);
    return pool;
}

/* Returns the pool from which a plain stream-ordered request on the device allocates. */
static struct pool *current_pool(int device, CUdevice cuda_device)
{
    CUmemoryPool handle;
    struct pool *pool = __atomic_load_n(&current[device], __ATOMIC_ACQUIRE);
    if (pool == NULL && CALL(cuDeviceGetMemPool, &handle, cuda_device) == CUDA_SUCCESS) {
        pool = note(handle, device, false);
        __atomic_store_n(&current[device], pool, __ATOMIC_RELEASE);
    }
    return pool;
}

static void trim(CUmemoryPool pool)
{
    int mode = vgpu_capture_relax_if_any();
    CALL(cuMemPoolTrimTo, pool, 0);
    vgpu_capture_restore_if_any(mode);
}

static bool settle_or_give_back(int device, bool gives_back)
{
    bool same = true;
    pthread_mutex_lock(&list);
    for (struct pool *pool = pools; pool != NULL; pool = pool->next) {
        if (pool->device != device)
            continue;
        if (gives_back && reserved_by(pool) > attribute(pool->handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, UINT64_MAX))
            trim(pool->handle);
        same = settle(pool) && same;
    }
    pthread_mutex_unlock(&list);
    return same;
}

static bool settle_all(int device)
{
    return settle_or_give_back(device, false);
}

static bool give_back(int device)
{
    return __atomic_load_n(&holding, __ATOMIC_RELAXED) != 0 && !settle_or_give_back(device, true);
}

static uint64_t charged(void)
{
    uint64_t bytes = 0;
    pthread_mutex_lock(&list);
    for (const struct pool *pool = pools; pool != NULL; pool = pool->next)
        bytes += __atomic_load_n(&pool->charged, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&list);
    return bytes;
}

static const struct vgpu_source pool_source = {settle_all, give_back, charged, VGPU_STAY_POOLS};
VGPU_SOURCE(pool_source);

void vgpu_pool_synchronised(void)
{
    if (__atomic_load_n(&holding, __ATOMIC_RELAXED) == 0)
        return;
    pthread_mutex_lock(&list);
    for (struct pool *pool = pools; pool != NULL; pool = pool->next)
        settle(pool);
    pthread_mutex_unlock(&list);
}

static void reset(void)
{
    pthread_mutex_init(&list, NULL);
    pools = NULL;
    holding = 0;
    memset(current, 0, sizeof(current));
}
VGPU_IN_CHILD(reset);

/* The state of a stream-ordered request: its claim and its pool. */
struct request {
    struct vgpu_charge charge;
    struct pool *pool; /* NULL: the request is not limited */
};

static CUresult claim(struct request *request, struct pool *pool, uint64_t bytes)
{
    if (pool == NULL)
        return CUDA_SUCCESS;
    CUresult result = vgpu_charge_index(&request->charge, pool->device, vgpu_round(bytes, VGPU_POOL_GRAIN));
    if (result == CUDA_SUCCESS)
        request->pool = pool;
    return result;
}

/*
 * Begins a stream-ordered request. While the stream is being captured, the request becomes a node of a graph: see
 * graph.c.
 */
static CUresult begin(struct request *request, CUstream stream, int per_thread, uint64_t bytes)
{
    CUdevice device = 0;
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    request->pool = NULL;
    vgpu_suspended_check(); /* the first call of a suspended process must wait here, before any call of the driver */
    if (result != CUDA_SUCCESS || !limited || vgpu_graph_captures(stream, per_thread))
        return result;
    int index = vgpu_device_alone();
    if (index == VGPU_NOT_IN_LEASE) {
        if (vgpu_device_of_stream(stream, per_thread, &device) != CUDA_SUCCESS)
            return result;
        index = vgpu_device_index(device);
    }
    return index == VGPU_NOT_IN_LEASE ? CUDA_ERROR_NOT_PERMITTED : claim(request, current_pool(index, device), bytes);
}

static CUresult begin_from(struct request *request, CUmemoryPool pool, CUstream stream, int per_thread, uint64_t bytes)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    request->pool = NULL;
    vgpu_suspended_check();
    if (result != CUDA_SUCCESS || !limited || vgpu_graph_captures(stream, per_thread))
        return result;
    return claim(request, find(pool), bytes);
}

static CUresult end(struct request *request, const CUdeviceptr *pointer, uint64_t bytes, CUresult result)
{
    if (request->pool == NULL)
        return result;
    if (result == CUDA_SUCCESS)
        settle_block(request->pool, *pointer, bytes);
    vgpu_charge_undo(&request->charge, result);
    return result;
}

#define ALLOC_ASYNC(symbol, per_thread)                                                                                \
    VGPU_EXPORT CUresult symbol(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)                                  \
    {                                                                                                                  \
        struct request request;                                                                                        \
        vgpu_suspended_call();                                                                                         \
        CUresult result = begin(&request, hStream, per_thread, bytesize);                                              \
        return result != CUDA_SUCCESS ? result : end(&request, dptr, bytesize, CALL(symbol, dptr, bytesize, hStream)); \
    }

#define ALLOC_FROM_POOL(symbol, per_thread)                                                                         \
    VGPU_EXPORT CUresult symbol(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)            \
    {                                                                                                               \
        struct request request;                                                                                     \
        vgpu_suspended_call();                                                                                      \
        CUresult result = begin_from(&request, pool, hStream, per_thread, bytesize);                                \
        return result != CUDA_SUCCESS ? result                                                                      \
                                      : end(&request, dptr, bytesize, CALL(symbol, dptr, bytesize, pool, hStream)); \
    }

/* Frees memory in stream order. The same call can free memory of cuMemAlloc. */
#define FREE_ASYNC(symbol, per_thread)                                                           \
    VGPU_EXPORT CUresult symbol(CUdeviceptr dptr, CUstream hStream)                              \
    {                                                                                            \
        struct vgpu_entry entry;                                                                 \
        CUresult result;                                                                         \
        vgpu_suspended_call();                                                                   \
        if (vgpu_swap_counts() && vgpu_evictable_free_after(dptr, hStream, per_thread, &result)) \
            return result;                                                                       \
        bool taken = vgpu_charge_take(VGPU_KIND_POINTER, dptr, &entry);                          \
        result = CALL(symbol, dptr, hStream);                                                    \
        if (taken)                                                                               \
            vgpu_charge_freed_later(&entry, taken, result);                                      \
        return result;                                                                           \
    }

ALLOC_ASYNC(cuMemAllocAsync, 0)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, 1)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, 0)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, 1)
FREE_ASYNC(cuMemFreeAsync, 0)
FREE_ASYNC(cuMemFreeAsync_ptsz, 1)

/* Records a pool at a location. A pool in host memory is not limited. */
static void note_at(CUmemoryPool pool, const CUmemLocation *location, CUmemAllocationType type)
{
    bool limited;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited)
        note(pool, vgpu_device_index(location->id), type == CU_MEM_ALLOCATION_TYPE_MANAGED);
}

static void note_of_device(CUmemoryPool pool, CUdevice device)
{
    note_at(pool, &(CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, CU_MEM_ALLOCATION_TYPE_PINNED);
}

/* Returns whether the process is limited and the pool is on a device outside of its lease. */
static bool is_outside(const CUmemPoolProps *props)
{
    bool limited;
    return props != NULL && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited &&
           vgpu_device_index(props->location.id) == VGPU_NOT_IN_LEASE;
}

VGPU_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    vgpu_suspended_call();
    if (is_outside(poolProps))
        return CUDA_ERROR_NOT_PERMITTED; /* refused as in cuMemCreate: such memory would be charged to no lease */
    CUresult result = CALL(cuMemPoolCreate, pool, poolProps);
    if (result == CUDA_SUCCESS)
        note_at(*pool, &poolProps->location, poolProps->allocType);
    return result;
}

static struct pool *forget(CUmemoryPool handle)
{
    struct vgpu_entry entry;
    if (!vgpu_table_take(VGPU_KIND_POOL, (uint64_t)(uintptr_t)handle, &entry))
        return NULL;
    struct pool **link = &pools;
    while (*link != NULL && *link != entry.owner)
        link = &(*link)->next;
    if (*link != NULL)
        *link = (*link)->next;
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        if (current[d] == entry.owner)
            current[d] = NULL;
    return entry.owner;
}

/*
 * Destroys a pool. Memory that was not freed before, or whose free is still pending, stays until it is freed, and is
 * measured.
 */
VGPU_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    vgpu_suspended_call();
    pthread_mutex_lock(&list);
    struct pool *known = find(pool);
    CUresult result = CALL(cuMemPoolDestroy, pool);
    if (known != NULL && result == CUDA_SUCCESS)
        forget(pool);
    pthread_mutex_unlock(&list);
    if (known == NULL || result != CUDA_SUCCESS)
        return result;
    if (known->unseen) {
        vgpu_account_release(vgpu_tenant_account(), (unsigned)known->device, known->charged);
        vgpu_overhead_unseen(known->device, -(int64_t)known->charged);
    } else if (known->charged > 0) {
        /* this call runs without the lock `list`, because a measurement takes that lock */
        vgpu_overhead_instead(known->device, known->charged);
    }
    vgpu_overhead_changed();
    vgpu_overhead_later(known->device);
    pthread_mutex_destroy(&known->mutex);
    free(known);
    return result;
}

static void settle_known(CUmemoryPool handle)
{
    pthread_mutex_lock(&list);
    struct pool *pool = find(handle);
    if (pool != NULL)
        settle(pool);
    pthread_mutex_unlock(&list);
}

VGPU_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuMemPoolTrimTo, pool, minBytesToKeep);
    settle_known(pool);
    return result;
}

VGPU_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuMemPoolSetAttribute, pool, attr, value);
    settle_known(pool);
    return result;
}

VGPU_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuDeviceGetDefaultMemPool, pool_out, dev);
    if (result == CUDA_SUCCESS)
        note_of_device(*pool_out, dev);
    return result;
}

VGPU_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuDeviceGetMemPool, pool, dev);
    if (result == CUDA_SUCCESS)
        note_of_device(*pool, dev);
    return result;
}

VGPU_EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuMemGetDefaultMemPool, pool_out, location, type);
    if (result == CUDA_SUCCESS)
        note_at(*pool_out, location, type);
    return result;
}

VGPU_EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuMemGetMemPool, pool, location, type);
    if (result == CUDA_SUCCESS)
        note_at(*pool, location, type);
    return result;
}

static void ask_again(void)
{
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        __atomic_store_n(&current[d], NULL, __ATOMIC_RELEASE);
}

VGPU_EXPORT CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuDeviceSetMemPool, dev, pool);
    ask_again();
    return result;
}

VGPU_EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuMemSetMemPool, location, type, pool);
    ask_again();
    return result;
}

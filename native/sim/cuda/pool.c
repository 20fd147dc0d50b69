/*
 * Memory pools. A pool keeps freed memory up to its release threshold, so that the device stays charged. Freed memory
 * beyond the threshold is released at once (on a card: at the next synchronisation).
 */
#include <unistd.h>

#include "internal.h"

static CUmemoryPool g_pools;

static bool is_pool(CUmemoryPool pool)
{
    return pool != NULL && pool->magic == CU_POOL;
}

CUmemoryPool cu_pool_new(int ordinal, bool is_default)
{
    CUmemoryPool pool = calloc(1, sizeof(*pool));
    if (pool == NULL)
        return NULL;
    pool->magic = CU_POOL;
    pool->ordinal = ordinal;
    pool->is_default = is_default;
    pool->origin = (struct cu_pool_origin){cu.proc->start_ticks, ++cu.next_id, cu.proc->pid};
    for (int i = 0; i < 4; i++)
        pool->reuse[i] = 1;
    pool->next = g_pools;
    g_pools = pool;
    return pool;
}

static void end_sharing(CUmemoryPool pool)
{
    if (pool->shared)
        cu_cannot_suspend(-1);
    if (pool->imported)
        close(pool->memory);
    pool->shared = pool->imported = false;
}

CUresult cu_pool_of_device(int ordinal, CUmemoryPool *pool)
{
    struct cu_device *d = &cu.devices[ordinal];
    if (d->default_pool == NULL)
        d->default_pool = cu_pool_new(ordinal, true);
    if (d->current_pool == NULL)
        d->current_pool = d->default_pool;
    *pool = d->current_pool;
    return *pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUmemoryPool cu_pool_of_graphs(int ordinal)
{
    struct cu_device *d = &cu.devices[ordinal];
    if (d->graph_pool == NULL && (d->graph_pool = cu_pool_new(ordinal, true)) != NULL)
        d->graph_pool->threshold = UINT64_MAX; /* the graph pool keeps its memory until it is trimmed */
    return d->graph_pool;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev)
{
    CUmemoryPool current;
    CU_TRY(cu_enter_device("cuDeviceGetDefaultMemPool", dev));
    CU_CHECK(pool != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_pool_of_device(dev, &current);
    *pool = cu.devices[dev].default_pool;
    cu_unlock();
    return result;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetMemPool", dev));
    CU_CHECK(pool != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_pool_of_device(dev, pool);
    cu_unlock();
    return result;
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    CU_TRY(cu_enter_device("cuDeviceSetMemPool", dev));
    CU_CHECK(is_pool(pool) && pool->ordinal == dev && !pool->imported, CUDA_ERROR_INVALID_VALUE);
    cu.devices[dev].current_pool = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    CU_TRY(cu_enter("cuMemPoolCreate"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(pool != NULL && props != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(props->location.id >= 0 && props->location.id < cu.device_count, CUDA_ERROR_INVALID_DEVICE);
    CU_CHECK((props->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0, CUDA_ERROR_NOT_SUPPORTED);
    cu_lock();
    *pool = cu_pool_new(props->location.id, false);
    if (*pool != NULL)
        (*pool)->handle_types = props->handleTypes;
    cu_unlock();
    return *pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    CU_TRY(cu_enter("cuMemPoolDestroy"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(is_pool(pool) && !pool->is_default, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    cu_free_of_pool(pool);
    pool->threshold = 0;
    cu_pool_trim(pool, 0);
    if (cu.devices[pool->ordinal].current_pool == pool)
        cu.devices[pool->ordinal].current_pool = cu.devices[pool->ordinal].default_pool;
    end_sharing(pool);
    pool->magic = CU_DEAD;
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    CU_TRY(cu_enter("cuMemPoolTrimTo"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(is_pool(pool), CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    cu_pool_trim(pool, keep);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CU_TRY(cu_enter("cuMemPoolSetAttribute"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(is_pool(pool) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse[attribute] = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        CU_CHECK(*(cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
        pool->reserved_high = pool->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        CU_CHECK(*(cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
        pool->used_high = pool->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CU_TRY(cu_enter("cuMemPoolGetAttribute"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(is_pool(pool) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    cuuint64_t *wide = value;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = pool->reuse[attribute];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *wide = pool->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *wide = pool->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *wide = pool->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *wide = pool->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *wide = pool->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    CU_TRY(cu_enter("cuMemPoolSetAccess"));
    return is_pool(pool) && (map != NULL || count == 0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    CU_TRY(cu_enter("cuMemPoolGetAccess"));
    CU_CHECK(flags != NULL && location != NULL && is_pool(pool), CUDA_ERROR_INVALID_VALUE);
    *flags = location->id == pool->ordinal ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

/* fake_pool.c: memory pools that grow by 32 MiB and shrink at a synchronisation, as a card's do. */
#include "fake.h"

#define POOLS 8
#define BLOCKS 65536
#define GRAIN (32ull << 20)

struct CUmemPoolHandle_st {
    int device;
    int made;
    int destroyed; /* the pool ends with its last allocation */
    uint64_t reserved, used, threshold;
};

static struct CUmemPoolHandle_st pools[POOLS]; /* the first entries are the devices' default pools */
static CUmemoryPool currents[DEVICES];
static struct {
    uint64_t at, bytes;
    CUmemoryPool pool;
} blocks[BLOCKS];
static uint64_t next_at = 0x600000000000;

static CUmemoryPool own(int device)
{
    pools[device].device = device;
    pools[device].made = 1;
    return currents[device] != NULL ? currents[device] : &pools[device];
}

static void shrink(CUmemoryPool pool, uint64_t keep)
{
    uint64_t least = (pool->used + GRAIN - 1) / GRAIN * GRAIN;
    keep = keep > pool->reserved ? pool->reserved : keep;
    least = least > keep ? least : (keep + GRAIN - 1) / GRAIN * GRAIN;
    if (least < pool->reserved) {
        fake_uncount(pool->device, pool->reserved - least);
        pool->reserved = least;
    }
}

static CUresult take(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool)
{
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes == 0 || pointer == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_mutex);
    uint64_t missing = pool->used + bytes > pool->reserved ? pool->used + bytes - pool->reserved : 0;
    uint64_t more = (missing + GRAIN - 1) / GRAIN * GRAIN;
    if (pool->used + bytes >= bytes && more >= missing && (more == 0 || fake_has_room(pool->device, more))) {
        uint64_t i = (next_at >> 9) % BLOCKS;
        while (blocks[i].at != 0)
            i = (i + 1) % BLOCKS;
        blocks[i].at = *pointer = next_at += 512;
        blocks[i].bytes = bytes;
        blocks[i].pool = pool;
        if (more > 0)
            fake_count(pool->device, more);
        pool->reserved += more;
        pool->used += bytes;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_mutex);
    return result;
}

bool fake_pool_free(CUdeviceptr pointer)
{
    bool found = false;
    pthread_mutex_lock(&fake_mutex);
    for (uint64_t n = 0, i = (pointer >> 9) % BLOCKS - 1; n < BLOCKS && !found; n++, i++)
        if (blocks[i % BLOCKS].at == pointer) {
            CUmemoryPool pool = blocks[i % BLOCKS].pool;
            pool->used -= blocks[i % BLOCKS].bytes;
            blocks[i % BLOCKS].at = 0;
            next_at -= pointer == next_at ? 512 : 0; /* the next allocation gets the same address again, as on a card */
            found = true;
            if (pool->destroyed && pool->used == 0)
                shrink(pool, 0);
        }
    pthread_mutex_unlock(&fake_mutex);
    return found;
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    (void)stream;
    NEED_CONTEXT
    return take(pointer, bytes, own(fake_device()));
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)stream;
    return take(pointer, bytes, pool);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    (void)stream;
    if (!fake_pool_free(pointer))
        fake_drop_later(pointer);
    return CUDA_SUCCESS;
}

static CUresult synchronise(void)
{
    fake_drop_due();
    pthread_mutex_lock(&fake_mutex);
    for (int i = 0; i < POOLS; i++)
        if (pools[i].made)
            shrink(&pools[i], pools[i].threshold);
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    return synchronise();
}
API CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    return synchronise();
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    *pool = own(device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    own(device);
    *pool = &pools[device];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    currents[device] = pool;
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    for (int i = DEVICES; i < POOLS; i++)
        if (!pools[i].made) {
            pools[i] = (struct CUmemPoolHandle_st){.device = props->location.id, .made = 1};
            *pool = &pools[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    pthread_mutex_lock(&fake_mutex);
    shrink(pool, 0);
    pool->made = pool->used > 0; /* a destroyed pool's entry may be used again only when no allocation is left in it */
    pool->destroyed = 1;
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    pthread_mutex_lock(&fake_mutex);
    shrink(pool, keep);
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    if (which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->threshold = *(cuuint64_t *)value;
    return CUDA_SUCCESS;
}

static int refused; /* 1: pools do not report their attributes */

API void fake_refuse_attributes(int refuse)
{
    refused = refuse;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
    if (refused)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    pthread_mutex_lock(&fake_mutex);
    *(cuuint64_t *)value = which == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? pool->reserved
                           : which == CU_MEMPOOL_ATTR_USED_MEM_CURRENT   ? pool->used
                                                                         : pool->threshold;
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

/*
 * The device memory that a pool holds. A pool keeps freed memory up to its release threshold, and releases the rest at
 * once (on a card: at the next synchronisation).
 */
#include "internal.h"

#define CHUNK (UINT64_C(32) << 20)

/* Rounds up to chunks, because a pool takes and releases memory in chunks (measured on an H200: 32 MiB). */
static uint64_t round_chunk(uint64_t bytes)
{
    return bytes > UINT64_MAX - CHUNK ? UINT64_MAX : (bytes + CHUNK - 1) / CHUNK * CHUNK;
}

CUresult cu_pool_charge(CUmemoryPool pool, uint64_t bytes)
{
    if (pool->used + bytes > pool->reserved) {
        uint64_t more = round_chunk(pool->used + bytes) - pool->reserved;
        CU_TRY(cu_charge(pool->ordinal, SIM_POOL, more));
        pool->reserved += more;
    }
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

void cu_pool_trim(CUmemoryPool pool, uint64_t keep)
{
    uint64_t floor = round_chunk(pool->used > keep ? pool->used : keep);
    if (pool->reserved <= floor)
        return;
    cu_uncharge(pool->ordinal, SIM_POOL, pool->reserved - floor);
    pool->reserved = floor;
}

void cu_pool_uncharge(CUmemoryPool pool, uint64_t bytes)
{
    pool->used -= bytes;
    cu_pool_trim(pool, pool->threshold);
}

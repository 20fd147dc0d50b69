/*
 * vmm.c: virtual memory management. Physical memory lives as long as a handle or a mapping refers to it, so the charge
 * belongs to a block that counts both. In a lease with evictable memory the program gets a name in place of the
 * driver's handle (physical.h). Every call that takes a handle translates it. A call that lets others keep the memory
 * fixes the memory on the card.
 */
#include <pthread.h>
#include <stdlib.h>

#include "suspended.h"
#include "charge.h"
#include "functions.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "allocation.h"
#include "evictable.h"
#include "physical.h"
#include "swap.h"
#include "tenant.h"

struct block {
    uint64_t bytes;
    int device; /* index of the device in the lease */
    uint32_t handles;
    uint32_t mappings;
    struct vgpu_allocation *memory; /* NULL: the program has the driver's handle itself */
    CUmemGenericAllocationHandle name;
    bool shared;  /* the memory was exported or bound, so it stays on the card */
    bool partial; /* the memory is not mapped as a whole at one address, so it stays on the card until it is unmapped */
};

static pthread_mutex_t blocks = PTHREAD_MUTEX_INITIALIZER; /* guards the counts of all blocks */

static void reset(void)
{
    pthread_mutex_init(&blocks, NULL);
}
VGPU_IN_CHILD(reset);

/* Enters the section of swap.h, so that the memory stays on the card until the caller leaves, and locks `blocks`. */
static bool lock_blocks(void)
{
    bool inside = vgpu_swap_enter();
    pthread_mutex_lock(&blocks);
    return inside;
}

static void unlock_blocks(bool inside)
{
    pthread_mutex_unlock(&blocks);
    vgpu_swap_leave(inside);
}

static struct block *block_of(CUmemGenericAllocationHandle handle)
{
    struct vgpu_entry entry;
    return vgpu_table_get(VGPU_KIND_HANDLE, handle, &entry) ? entry.owner : NULL;
}

/* Returns the driver's handle for the program's handle. */
static CUmemGenericAllocationHandle real_of(CUmemGenericAllocationHandle handle)
{
    const struct block *block = block_of(handle);
    return block != NULL && block->memory != NULL ? block->memory->chunks[0].handle : handle;
}

static void fix(struct block *block)
{
    if (block != NULL && block->memory != NULL)
        vgpu_physical_fixed(block->memory);
}

static void fix_shared(struct block *block)
{
    fix(block);
    if (block != NULL)
        block->shared = true;
}

/* Frees the block if no handle and no mapping refers to it. Precondition: the lock `blocks` is held. */
static void let_go(struct block *block)
{
    if (block->mappings == 0)
        block->partial = false;
    if (block->handles > 0 || block->mappings > 0)
        return;
    if (block->memory != NULL) {
        CALL(cuMemRelease, block->memory->chunks[0].handle);
        free(block->memory);
    }
    vgpu_account_release(vgpu_tenant_account(), (unsigned)block->device, block->bytes);
    vgpu_overhead_changed();
    free(block);
}

static struct vgpu_entry handle_entry(CUmemGenericAllocationHandle handle, struct block *block)
{
    return (struct vgpu_entry){.kind = VGPU_KIND_HANDLE, .key = handle, .owner = block};
}

/* Makes the driver allocate the block's memory. *handle becomes the program's handle. */
static CUresult create(struct block *block, CUmemGenericAllocationHandle *handle, size_t size,
                       const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct vgpu_allocation *memory = handle != NULL && flags == 0 ? vgpu_physical_make(size, prop) : NULL;
    if (memory == NULL)
        return CALL(cuMemCreate, handle, size, prop, flags);
    CUresult result = CALL(cuMemCreate, &memory->chunks[0].handle, size, &memory->prop, flags);
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    block->memory = memory;
    block->name = vgpu_physical_name();
    *handle = block->name;
    return CUDA_SUCCESS;
}

/* Records the block of a new handle. If that fails, its memory is released, and the block is freed. */
static CUresult keep_block(struct block *block, struct vgpu_charge *charge, CUmemGenericAllocationHandle handle)
{
    bool keep;
    struct vgpu_entry entry = handle_entry(handle, block);
    block->bytes = charge->bytes;
    block->device = charge->device;
    block->handles = 1;
    CUresult result = vgpu_charge_settle(charge, CUDA_SUCCESS, &entry, &keep);
    if (keep)
        return result;
    CALL(cuMemRelease, block->memory != NULL ? block->memory->chunks[0].handle : handle);
    vgpu_charge_undo(charge, CUDA_SUCCESS);
    free(block->memory);
    free(block);
    return result;
}

VGPU_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                 unsigned long long flags)
{
    vgpu_suspended_call();
    struct vgpu_charge charge = {.active = false};
    if (prop == NULL || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CALL(cuMemCreate, handle, size, prop, flags);
    CUresult result = vgpu_charge_device(&charge, prop->location.id, size);
    if (result != CUDA_SUCCESS)
        return result;
    struct block *block = charge.active ? calloc(1, sizeof(*block)) : NULL;
    if (charge.active && block == NULL) {
        vgpu_charge_undo(&charge, CUDA_SUCCESS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    bool inside = vgpu_swap_enter();
    result = block == NULL ? CALL(cuMemCreate, handle, size, prop, flags) : create(block, handle, size, prop, flags);
    if (result != CUDA_SUCCESS || block == NULL) {
        vgpu_charge_undo(&charge, result);
        free(block);
    } else {
        result = keep_block(block, &charge, *handle);
    }
    vgpu_swap_leave(inside);
    return result;
}

/*
 * The driver returns the same handle for each reference to the memory. So the block counts references, and its entry is
 * removed with the last reference.
 */
VGPU_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    vgpu_suspended_call();
    struct vgpu_entry entry;
    bool inside = lock_blocks();
    vgpu_overhead_free_begins();
    bool known = vgpu_table_take(VGPU_KIND_HANDLE, handle, &entry);
    struct block *block = known ? entry.owner : NULL;
    bool named = known && block->memory != NULL; /* the block keeps the driver's handle until it is freed */
    CUresult result = named ? CUDA_SUCCESS : CALL(cuMemRelease, handle);
    if (known) {
        if (result == CUDA_SUCCESS)
            block->handles--;
        if (block->handles > 0)
            vgpu_table_put(&entry);
        let_go(block);
    }
    vgpu_overhead_free_ends();
    unlock_blocks(inside);
    return result;
}

VGPU_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    vgpu_suspended_call();
    struct vgpu_entry mapping;
    if (vgpu_evictable_range((CUdeviceptr)(uintptr_t)addr, NULL, NULL))
        return CUDA_ERROR_INVALID_VALUE; /* returns the error that the driver returns for any plain memory */
    bool inside = lock_blocks();
    bool known = vgpu_table_holding(VGPU_KIND_MAPPING, (uint64_t)(uintptr_t)addr, &mapping) && mapping.owner != NULL;
    struct block *block = known ? mapping.owner : NULL;
    bool named = known && block->memory != NULL && handle != NULL;
    CUresult result = named ? CUDA_SUCCESS : CALL(cuMemRetainAllocationHandle, handle, addr);
    if (named)
        *handle = block->name;
    if (result == CUDA_SUCCESS && known) {
        struct vgpu_entry entry = handle_entry(*handle, block);
        if (vgpu_table_put(&entry))
            block->handles++;
    }
    unlock_blocks(inside);
    return result;
}

/*
 * Records a mapping of a block; block NULL: of memory for which another process is charged. Such a mapping is recorded
 * too, because one unmap may cover mappings of both kinds. Precondition: the lock `blocks` is held.
 */
static void note_mapping(CUdeviceptr at, size_t bytes, struct block *block)
{
    bool limited;
    struct vgpu_entry mapping = {.kind = VGPU_KIND_MAPPING, .key = at, .bytes = bytes, .owner = block};
    if (vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited && vgpu_table_put(&mapping) && block != NULL)
        block->mappings++;
}

VGPU_EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                              unsigned long long flags)
{
    vgpu_suspended_call();
    bool inside = lock_blocks();
    CUresult result = CALL(cuMemMap, ptr, size, offset, real_of(handle), flags);
    if (result == CUDA_SUCCESS) {
        struct block *block = block_of(handle);
        note_mapping(ptr, size, block);
        if (block != NULL && block->memory != NULL && (block->mappings != 1 || size != block->memory->bytes)) {
            fix(block);
            block->partial = true;
        }
    }
    unlock_blocks(inside);
    return result;
}

/* Visits the block of each mapping in a range, up to the first address that is not the start of a mapping. */
static void each_block(CUdeviceptr ptr, size_t size, void (*visit)(struct block *block, CUdeviceptr base, int device),
                       int device)
{
    struct vgpu_entry mapping;
    for (CUdeviceptr at = ptr; at - ptr < size && vgpu_table_get(VGPU_KIND_MAPPING, at, &mapping) && mapping.bytes > 0;
         at += mapping.bytes)
        if (mapping.owner != NULL)
            visit(mapping.owner, at, device);
}

static void stay(struct block *block, CUdeviceptr base, int device)
{
    (void)base;
    (void)device;
    fix(block);
}

/*
 * Called when only `device` may read and write the memory, which is the access that memory has after it comes back.
 * Makes the memory movable, unless it is shared, mapped in part or on another device.
 */
static void move_freely(struct block *block, CUdeviceptr base, int device)
{
    if (block->memory == NULL || block->shared || block->partial || block->memory->prop.location.id != device)
        fix(block);
    else
        vgpu_physical_movable(block->memory, base);
}

static bool is_whole(const CUmemAccessDesc *desc, size_t count)
{
    return desc != NULL && count == 1 && desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

VGPU_EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    vgpu_suspended_call();
    bool inside = lock_blocks();
    CUresult result = CALL(cuMemSetAccess, ptr, size, desc, count);
    bool whole = result == CUDA_SUCCESS && is_whole(desc, count);
    if (inside)
        each_block(ptr, size, whole ? move_freely : stay, whole ? desc->location.id : -1);
    unlock_blocks(inside);
    return result;
}

/* Unmaps a range. One call may cover several adjacent mappings, each of them as a whole. */
VGPU_EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    vgpu_suspended_call();
    struct vgpu_entry mapping;
    bool inside = lock_blocks();
    vgpu_overhead_free_begins();
    if (inside)
        each_block(ptr, size, stay, -1);
    CUresult result = CALL(cuMemUnmap, ptr, size);
    if (result == CUDA_SUCCESS) {
        CUdeviceptr at = ptr;
        while (at - ptr < size && vgpu_table_take(VGPU_KIND_MAPPING, at, &mapping) && mapping.bytes > 0) {
            struct block *block = mapping.owner;
            at += mapping.bytes;
            if (block == NULL)
                continue;
            block->mappings--;
            let_go(block);
        }
    }
    vgpu_overhead_free_ends();
    unlock_blocks(inside);
    return result;
}

VGPU_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                            CUmemGenericAllocationHandle handle)
{
    vgpu_suspended_call();
    bool inside = lock_blocks();
    CUresult result = CALL(cuMemGetAllocationPropertiesFromHandle, prop, real_of(handle));
    unlock_blocks(inside);
    return result;
}

/* --- calls after which the memory must stay on the card, because not only this process's mappings use it */

/* Calls `symbol` with `__VA_ARGS__`. If it succeeds, the memory of `handle` stays on the card from then on. */
#define SHARE(handle, symbol, ...)                   \
    do {                                             \
        vgpu_suspended_call();                       \
        bool inside = lock_blocks();                 \
        CUresult result = CALL(symbol, __VA_ARGS__); \
        if (result == CUDA_SUCCESS)                  \
            fix_shared(block_of(handle));            \
        unlock_blocks(inside);                       \
        return result;                               \
    } while (0)

VGPU_EXPORT CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                  CUmemAllocationHandleType handleType, unsigned long long flags)
{
    SHARE(handle, cuMemExportToShareableHandle, shareableHandle, real_of(handle), handleType, flags);
}

VGPU_EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                                        CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                                        unsigned long long flags)
{
    SHARE(memHandle, cuMulticastBindMem, mcHandle, mcOffset, real_of(memHandle), memOffset, size, flags);
}

VGPU_EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                           CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                                           unsigned long long flags)
{
    SHARE(memHandle, cuMulticastBindMem_v2, mcHandle, dev, mcOffset, real_of(memHandle), memOffset, size, flags);
}

VGPU_EXPORT CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset,
                                              CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset,
                                              cuuint64_t size, unsigned long long flags)
{
    SHARE(memHandle, cuLogicalEndpointBindMem, leId, dev, offset, real_of(memHandle), memOffset, size, flags);
}

/* Maps parts of the memory of several handles into arrays, and fixes the memory on the card. */
#define MAP_ARRAYS(symbol)                                                                              \
    do {                                                                                                \
        vgpu_suspended_call();                                                                          \
        CUarrayMapInfo *list = mapInfoList == NULL ? NULL : calloc(count + 1u, sizeof(mapInfoList[0])); \
        bool inside = lock_blocks();                                                                    \
        for (unsigned i = 0; list != NULL && i < count; i++) {                                          \
            fix_shared(block_of(mapInfoList[i].memHandle.memHandle));                                   \
            list[i] = mapInfoList[i];                                                                   \
            list[i].memHandle.memHandle = real_of(list[i].memHandle.memHandle);                         \
        }                                                                                               \
        CUresult result = CALL(symbol, list != NULL ? list : mapInfoList, count, hStream);              \
        unlock_blocks(inside);                                                                          \
        free(list);                                                                                     \
        return result;                                                                                  \
    } while (0)

VGPU_EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)
{
    MAP_ARRAYS(cuMemMapArrayAsync);
}

VGPU_EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)
{
    MAP_ARRAYS(cuMemMapArrayAsync_ptsz);
}

/* As SHARE, but fixes the memory of all mappings in a range. Plain evictable memory is in chunks, and cannot be shared. */
#define SHARE_RANGE(ptr, size, symbol, ...)                                  \
    do {                                                                     \
        vgpu_suspended_call();                                               \
        if (vgpu_evictable_range((CUdeviceptr)(uintptr_t)(ptr), NULL, NULL)) \
            return CUDA_ERROR_INVALID_VALUE;                                 \
        bool inside = lock_blocks();                                         \
        CUresult result = CALL(symbol, __VA_ARGS__);                         \
        if (result == CUDA_SUCCESS)                                          \
            share_range((CUdeviceptr)(uintptr_t)(ptr), size);                \
        unlock_blocks(inside);                                               \
        return result;                                                       \
    } while (0)

static void share(struct block *block, CUdeviceptr base, int device)
{
    (void)base;
    (void)device;
    fix_shared(block);
}

/* Fixes the memory of a range on the card. The first of its mappings may begin before the range. */
static void share_range(CUdeviceptr ptr, size_t size)
{
    struct vgpu_entry first;
    if (vgpu_table_holding(VGPU_KIND_MAPPING, ptr, &first))
        each_block(first.key, ptr + size - first.key, share, -1);
}

VGPU_EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size,
                                                   CUmemRangeHandleType handleType, unsigned long long flags)
{
    SHARE_RANGE(dptr, size, cuMemGetHandleForAddressRange, handle, dptr, size, handleType, flags);
}

VGPU_EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr,
                                         size_t size, unsigned long long flags)
{
    SHARE_RANGE(memptr, size, cuMulticastBindAddr, mcHandle, mcOffset, memptr, size, flags);
}

VGPU_EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                                            CUdeviceptr memptr, size_t size, unsigned long long flags)
{
    SHARE_RANGE(memptr, size, cuMulticastBindAddr_v2, mcHandle, dev, mcOffset, memptr, size, flags);
}

VGPU_EXPORT CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, void *ptr,
                                               cuuint64_t size, unsigned long long flags)
{
    SHARE_RANGE(ptr, size, cuLogicalEndpointBindAddr, leId, dev, offset, ptr, size, flags);
}

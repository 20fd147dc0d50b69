/*
 * vmm.c: virtual memory management. Physical memory lives as long as a handle or a mapping refers to it, so the charge
 * belongs to a block that counts both.
 */
#include <pthread.h>
#include <stdlib.h>

#include "suspended.h"
#include "charge.h"
#include "functions.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "evictable.h"
#include "tenant.h"
struct block {
    uint64_t bytes;
    int device; /* index in the lease */
    uint32_t handles;
    uint32_t mappings;
};

static pthread_mutex_t blocks = PTHREAD_MUTEX_INITIALIZER; /* guards the counts of all blocks */

static void reset(void)
{
    pthread_mutex_init(&blocks, NULL);
}
VGPU_IN_CHILD(reset);

/* Frees the block if no handle and no mapping refers to it. Precondition: `blocks` is held. */
static void let_go(struct block *block)
{
    if (block->handles > 0 || block->mappings > 0)
        return;
    vgpu_account_release(vgpu_tenant_account(), (unsigned)block->device, block->bytes);
    vgpu_overhead_changed();
    free(block);
}

static struct vgpu_entry handle_entry(CUmemGenericAllocationHandle handle, struct block *block)
{
    return (struct vgpu_entry){.kind = VGPU_KIND_HANDLE, .key = handle, .owner = block};
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
    result = CALL(cuMemCreate, handle, size, prop, flags);
    if (result != CUDA_SUCCESS || block == NULL) {
        vgpu_charge_undo(&charge, result);
        free(block);
        return result;
    }
    *block = (struct block){.bytes = charge.bytes, .device = charge.device, .handles = 1};
    struct vgpu_entry entry = handle_entry(*handle, block);
    bool keep;
    result = vgpu_charge_settle(&charge, result, &entry, &keep);
    if (!keep) {
        CALL(cuMemRelease, *handle);
        vgpu_charge_undo(&charge, CUDA_SUCCESS);
        free(block);
    }
    return result;
}

/*
 * The driver returns the same handle for another reference: the block counts these, and the entry is removed with the
 * last.
 */
VGPU_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    vgpu_suspended_call();
    struct vgpu_entry entry;
    pthread_mutex_lock(&blocks);
    vgpu_overhead_free_begins();
    bool known = vgpu_table_take(VGPU_KIND_HANDLE, handle, &entry);
    CUresult result = CALL(cuMemRelease, handle);
    if (known) {
        struct block *block = entry.owner;
        if (result == CUDA_SUCCESS)
            block->handles--;
        if (block->handles > 0)
            vgpu_table_put(&entry);
        let_go(block);
    }
    vgpu_overhead_free_ends();
    pthread_mutex_unlock(&blocks);
    return result;
}

VGPU_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    vgpu_suspended_call();
    struct vgpu_entry mapping;
    if (vgpu_evictable_range((CUdeviceptr)(uintptr_t)addr, NULL, NULL))
        return CUDA_ERROR_INVALID_VALUE; /* as for any plain memory */
    pthread_mutex_lock(&blocks);
    CUresult result = CALL(cuMemRetainAllocationHandle, handle, addr);
    if (result == CUDA_SUCCESS && vgpu_table_holding(VGPU_KIND_MAPPING, (uint64_t)(uintptr_t)addr, &mapping) &&
        mapping.owner != NULL) {
        struct block *block = mapping.owner;
        struct vgpu_entry entry = handle_entry(*handle, block);
        if (vgpu_table_put(&entry))
            block->handles++;
    }
    pthread_mutex_unlock(&blocks);
    return result;
}

/*
 * Records a mapping of a block, or of memory that another process is charged for (NULL): its place is needed when one
 * unmap covers both. Precondition: `blocks` is held.
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
    struct vgpu_entry held = {.owner = NULL};
    pthread_mutex_lock(&blocks);
    CUresult result = CALL(cuMemMap, ptr, size, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        bool known = vgpu_table_get(VGPU_KIND_HANDLE, handle, &held);
        note_mapping(ptr, size, known ? held.owner : NULL);
    }
    pthread_mutex_unlock(&blocks);
    return result;
}

/* One unmap may cover several adjacent mappings, each of them whole. */
VGPU_EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    vgpu_suspended_call();
    struct vgpu_entry mapping;
    pthread_mutex_lock(&blocks);
    vgpu_overhead_free_begins();
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
    pthread_mutex_unlock(&blocks);
    return result;
}

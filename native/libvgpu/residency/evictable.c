#include "evictable.h"

#include <stdlib.h>

#include "capture.h"
#include "device.h"
#include "functions.h"
#include "driver_overhead.h"
#include "allocation.h"
#include "physical.h"
#include "swap.h"
#include "tenant.h"

static void unmap_all(struct vgpu_allocation *allocation)
{
    for (unsigned i = 0; i < allocation->chunk_count; i++)
        if (allocation->chunks[i].handle != 0)
            vgpu_chunk_unmap(allocation, i);
}

static CUmemAllocationProp prop_of(CUdevice device)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
}

static bool has_granularity(CUdevice device)
{
    static size_t known; /* granularity of the driver; the same for all devices that a lease can have */
    CUmemAllocationProp prop = prop_of(device);
    size_t now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (now == 0 && CALL(cuMemGetAllocationGranularity, &now, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS)
        __atomic_store_n(&known, now, __ATOMIC_RELAXED);
    return now == VGPU_PAGE_BYTES;
}

static struct vgpu_allocation *make_allocation(const struct vgpu_charge *charge, CUdevice device, uint64_t asked)
{
    struct vgpu_allocation *allocation = vgpu_allocation_make(charge->bytes, VGPU_CHUNK_BYTES);
    if (allocation == NULL)
        return NULL;
    allocation->asked = asked;
    allocation->prop = prop_of(device);
    allocation->index = charge->device;
    allocation->context = vgpu_charge_context();
    /* a free waits for the work of the context, so without it the memory could not be freed */
    CUresult result = allocation->context == NULL
                          ? CUDA_ERROR_INVALID_CONTEXT
                          : CALL(cuMemAddressReserve, &allocation->base, allocation->bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
        free(allocation);
        return NULL;
    }
    for (unsigned i = 0; i < allocation->chunk_count && result == CUDA_SUCCESS; i++)
        result = vgpu_chunk_map(allocation, i);
    if (result == CUDA_SUCCESS)
        return allocation;
    unmap_all(allocation);
    CALL(cuMemAddressFree, allocation->base, allocation->bytes);
    free(allocation);
    return NULL;
}

static void end_allocation(struct vgpu_allocation *allocation)
{
    unmap_all(allocation);
    CALL(cuMemAddressFree, allocation->base, allocation->bytes);
    vgpu_swap_holds(-(int64_t)allocation->bytes);
    free(allocation);
}

static bool remember(struct vgpu_charge *charge, struct vgpu_allocation *allocation)
{
    bool keep;
    struct vgpu_entry entry = {.kind = VGPU_KIND_EVICTABLE, .key = allocation->base, .owner = allocation};
    vgpu_swap_holds((int64_t)allocation->bytes);
    vgpu_charge_settle(charge, CUDA_SUCCESS, &entry, &keep);
    if (!keep)
        end_allocation(allocation);
    else
        vgpu_allocation_link(allocation);
    return keep;
}

bool vgpu_evictable_alloc(struct vgpu_charge *charge, uint64_t bytes, CUdeviceptr *pointer)
{
    CUdevice device;
    if (!charge->active || pointer == NULL || bytes <= VGPU_SHARED_MAX || !vgpu_swap_wanted() || vgpu_capture_any() ||
        vgpu_device_current(&device) != CUDA_SUCCESS || !has_granularity(device))
        return false;
    vgpu_swap_count();
    bool inside = vgpu_swap_enter();
    vgpu_evictable_sweep();
    struct vgpu_allocation *allocation = make_allocation(charge, device, bytes);
    bool made = allocation != NULL && remember(charge, allocation);
    if (made)
        *pointer = allocation->base;
    vgpu_swap_leave(inside);
    return made;
}

/* Waits for the work of the context, as the driver's own free does. */
static CUresult wait_for(CUcontext context)
{
    CUcontext popped;
    CUresult result = CALL(cuCtxPushCurrent_v2, context);
    if (result != CUDA_SUCCESS)
        return result;
    CUstreamCaptureMode mode = vgpu_capture_relax();
    result = CALL(cuCtxSynchronize);
    vgpu_capture_restore(mode);
    CALL(cuCtxPopCurrent_v2, &popped);
    return result;
}

/*
 * Waits for the work of the context, and frees an allocation that the program frees. If the wait fails, nothing is
 * freed. During a stream capture the memory stays until vgpu_evictable_sweep. Precondition: the caller is inside.
 */
static CUresult let_go(const struct vgpu_entry *entry)
{
    struct vgpu_allocation *allocation = entry->owner;
    bool dead = vgpu_capture_any();
    CUresult result = dead ? CUDA_SUCCESS : wait_for(allocation->context);
    if (result == CUDA_SUCCESS && !dead) {
        vgpu_allocation_unlink(allocation);
        end_allocation(allocation);
    }
    if (dead) {
        allocation->dead = true;
        vgpu_overhead_free_ends(); /* the memory is still charged until vgpu_evictable_sweep frees it */
    } else {
        vgpu_charge_freed(entry, true, result);
    }
    return result;
}

static bool take(CUdeviceptr pointer, struct vgpu_entry *entry)
{
    if (!vgpu_table_take(VGPU_KIND_EVICTABLE, pointer, entry))
        return false;
    vgpu_overhead_free_begins();
    return true;
}

bool vgpu_evictable_free(CUdeviceptr pointer, CUresult *result)
{
    struct vgpu_entry entry;
    if (!vgpu_swap_counts() || !vgpu_table_get(VGPU_KIND_EVICTABLE, pointer, &entry))
        return false;
    bool inside = vgpu_swap_enter();
    bool ours = take(pointer, &entry);
    if (ours)
        *result = let_go(&entry);
    vgpu_evictable_sweep();
    vgpu_swap_leave(inside);
    return ours;
}

bool vgpu_evictable_free_after(CUdeviceptr pointer, CUstream stream, int per_thread, CUresult *result)
{
    struct vgpu_entry entry;
    if (!vgpu_swap_counts() || !vgpu_table_get(VGPU_KIND_EVICTABLE, pointer, &entry))
        return false;
    *result = per_thread ? CALL(cuStreamSynchronize_ptsz, stream) : CALL(cuStreamSynchronize, stream);
    return *result != CUDA_SUCCESS || vgpu_evictable_free(pointer, result);
}

static void end_charged(struct vgpu_allocation *allocation)
{
    struct vgpu_entry entry = {
        .kind = VGPU_KIND_EVICTABLE, .bytes = allocation->bytes, .device = (int8_t)allocation->index};
    vgpu_overhead_free_begins();
    end_allocation(allocation);
    vgpu_charge_freed(&entry, true, CUDA_SUCCESS);
}

static bool is_dead(const struct vgpu_allocation *allocation, void *unused)
{
    (void)unused;
    return allocation->dead;
}

void vgpu_evictable_sweep(void)
{
    if (vgpu_capture_any())
        return;
    for (struct vgpu_allocation *allocation; (allocation = vgpu_allocation_find(is_dead, NULL, true)) != NULL;) {
        wait_for(allocation->context);
        end_charged(allocation);
    }
}

struct range {
    CUdeviceptr pointer;
    CUdeviceptr *base;
    size_t *bytes;
};

static bool is_around(const struct vgpu_allocation *allocation, void *argument)
{
    const struct range *range = argument;
    if (allocation->of_program || range->pointer - allocation->base >= allocation->bytes)
        return false;
    if (range->base != NULL)
        *range->base = allocation->base;
    if (range->bytes != NULL)
        *range->bytes = allocation->asked;
    return true;
}

bool vgpu_evictable_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes)
{
    if (!vgpu_swap_counts())
        return false;
    struct range range = {pointer, base, bytes};
    return vgpu_allocation_find(is_around, &range, false) != NULL;
}

/* Does the allocation end with the context? An allocation that another thread is freeing at this moment is skipped. */
static bool ends_with(const struct vgpu_allocation *allocation, void *context)
{
    struct vgpu_entry known;
    return allocation->context == context && !allocation->of_program &&
           (allocation->dead || vgpu_table_take(VGPU_KIND_EVICTABLE, allocation->base, &known));
}

void vgpu_evictable_end_context(CUcontext context)
{
    if (context == NULL || !vgpu_swap_counts())
        return;
    vgpu_physical_end_context(context);
    for (struct vgpu_allocation *allocation; (allocation = vgpu_allocation_find(ends_with, context, true)) != NULL;)
        end_charged(allocation);
    vgpu_swap_forget(context);
}

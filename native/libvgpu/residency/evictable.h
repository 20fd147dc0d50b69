/*
 * evictable.h: plain device memory that can leave the card and come back at the same addresses. Unless the lease's
 * `memory` is VGPU_MEMORY_FIXED or a stream capture is under way, cuMemAlloc and cuMemAllocPitch of more than
 * VGPU_SHARED_MAX bytes get a range of addresses into which physical memory is mapped chunk by chunk. swap.h takes the
 * chunks out and brings them back.
 *
 * Any thread may call these functions. vgpu_evictable_alloc, vgpu_evictable_free and vgpu_evictable_free_after enter
 * (vgpu_swap_enter) by themselves, so that the list of allocations does not change while memory is out. The caller of
 * vgpu_evictable_sweep must be inside. vgpu_evictable_range needs neither.
 */
#ifndef VGPU_EVICTABLE_H
#define VGPU_EVICTABLE_H

#include "charge.h"

/*
 * Serves a charged request of `bytes` in the current context, and settles the charge. Returns false if the driver has
 * to serve the request; the charge and *pointer are then unchanged.
 */
bool vgpu_evictable_alloc(struct vgpu_charge *charge, uint64_t bytes, CUdeviceptr *pointer);

/*
 * Frees an allocation of vgpu_evictable_alloc, and sets *result to the result of the program's call. Returns false, and
 * does not write *result, if `pointer` is no such allocation.
 */
bool vgpu_evictable_free(CUdeviceptr pointer, CUresult *result);

/* As vgpu_evictable_free, but first waits for the work that is on the stream now. If that fails, nothing is freed. */
bool vgpu_evictable_free_after(CUdeviceptr pointer, CUstream stream, int per_thread, CUresult *result);

/*
 * Sets *base and *bytes to the allocation that contains `pointer`. Returns false if no evictable allocation contains
 * it.
 */
bool vgpu_evictable_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes);

/*
 * Called when the context has ended: frees its evictable allocations, and gives back their charges. Precondition: the
 * caller is between vgpu_swap_ending_begins and vgpu_swap_ending_ends.
 */
void vgpu_evictable_end_context(CUcontext context);

/*
 * Frees memory that the program freed during a stream capture, when a call of the driver would have invalidated the
 * capture. Does nothing while a capture is under way.
 */
void vgpu_evictable_sweep(void);

#endif

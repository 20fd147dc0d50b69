/*
 * evictable.h: plain device memory that can leave the card and come back at the same addresses. In a lease that
 * says so (vgpu_lease_memory) cuMemAlloc and cuMemAllocPitch of more than VGPU_SHARED_MAX get a range of addresses
 * with physical memory mapped into it, chunk by chunk; swap.h takes the chunks out and brings them back.
 *
 * Precondition of each function but vgpu_evictable_sweep: the calling thread is inside (vgpu_swap_enter), so that the
 * list of allocations does not change while memory is out. All may be called by any thread.
 */
#ifndef VGPU_EVICTABLE_H
#define VGPU_EVICTABLE_H

#include "charge.h"

/* Serves a charged request of `bytes` in the current context, and settles the charge. False: the driver is to serve
 * it; the charge and *pointer are as they were. */
bool vgpu_evictable_alloc(struct vgpu_charge *charge, uint64_t bytes, CUdeviceptr *pointer);

/* Frees an allocation of vgpu_evictable_alloc, and sets *result to the answer of the call. False: `pointer` is none of
 * these, and *result is not written. */
bool vgpu_evictable_free(CUdeviceptr pointer, CUresult *result);

/* As vgpu_evictable_free, when the work that is on the stream now has run. */
bool vgpu_evictable_free_after(CUdeviceptr pointer, CUstream stream, int per_thread, CUresult *result);

/* Sets *base and *bytes to the allocation in which `pointer` lies. False: it lies in none of these. */
bool vgpu_evictable_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes);

/* The context is about to end, or has just ended: its allocations are forgotten, and their charges given back. */
void vgpu_evictable_end_context(CUcontext context);

/* Frees what the program freed during a stream capture, which a call of the driver would have invalidated. */
void vgpu_evictable_sweep(void);

#endif

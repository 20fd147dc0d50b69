/*
 * movable.h: plain device memory that can leave the card and come back at the same addresses. In a lease that
 * says so (vgpu_lease_memory) cuMemAlloc and cuMemAllocPitch of more than VGPU_SHARED_MAX get a range of addresses
 * with physical memory mapped into it, chunk by chunk; swap.h takes the chunks out and brings them back.
 *
 * Whoever makes or frees such memory is inside (vgpu_swap_enter): while it is out, the list below changes no more.
 */
#ifndef VGPU_MOVABLE_H
#define VGPU_MOVABLE_H

#include "charge.h"

/* Serves a charged request of `bytes` in the current context, and settles the charge. False: it is left to the
 * driver, with the charge as it was. */
bool vgpu_movable_alloc(struct vgpu_charge *charge, uint64_t bytes, CUdeviceptr *pointer);

/* Frees what vgpu_movable_alloc gave; false: it did not give that. */
bool vgpu_movable_free(CUdeviceptr pointer, CUresult *result);

/* The same when what is on the stream now is done. */
bool vgpu_movable_free_after(CUdeviceptr pointer, CUstream stream, int per_thread, CUresult *result);

/* The allocation in which an address lies; false: none of these. */
bool vgpu_movable_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes);

/* A context is about to end, or has just ended. */
void vgpu_movable_end_context(CUcontext context);

/* What the program freed while a capture was under way, which a free would have broken, goes now. */
void vgpu_movable_sweep(void);

#endif

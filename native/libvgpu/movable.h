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

#define VGPU_CHUNK_BYTES (128u << 20) /* copies as fast as a whole, and soon gives room to others (H200) */

struct vgpu_chunk {
    CUmemGenericAllocationHandle handle; /* 0: out */
    bool fresh;                          /* on its way in: its copy on the host is true still */
    uint64_t place;                      /* in the host's buffer, while it is out */
};

/* One allocation. */
struct vgpu_piece {
    struct vgpu_piece *next;
    struct vgpu_piece **from;
    CUdeviceptr base;
    uint64_t bytes; /* whole pages */
    uint64_t asked;
    CUdevice device;
    int index;         /* of the device in the lease */
    CUcontext context; /* whose end frees it */
    bool dead;         /* freed by the program, but not yet at the driver */
    unsigned chunk_count;
    struct vgpu_chunk chunks[];
};

static inline uint64_t vgpu_chunk_bytes(const struct vgpu_piece *piece, unsigned chunk)
{
    uint64_t left = piece->bytes - (uint64_t)chunk * VGPU_CHUNK_BYTES;
    return left < VGPU_CHUNK_BYTES ? left : VGPU_CHUNK_BYTES;
}

static inline CUdeviceptr vgpu_chunk_base(const struct vgpu_piece *piece, unsigned chunk)
{
    return piece->base + (uint64_t)chunk * VGPU_CHUNK_BYTES;
}

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

/* Physical memory for one chunk, mapped at its address. An error: nothing has changed. */
CUresult vgpu_chunk_map(struct vgpu_piece *piece, unsigned chunk);
void vgpu_chunk_unmap(struct vgpu_piece *piece, unsigned chunk);

/* The list of all, newest first: for whoever has made sure that nobody is inside. */
struct vgpu_piece *vgpu_movable_pieces(void);

/* What the program freed while a capture was under way, which a free would have broken, goes now. */
void vgpu_movable_sweep(void);

void vgpu_movable_reset(void);

#endif

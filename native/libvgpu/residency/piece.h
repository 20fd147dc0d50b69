/*
 * piece.h: the allocations that can leave the card (evictable.h): the list of them, and the physical memory behind each
 * chunk of one.
 */
#ifndef VGPU_PIECE_H
#define VGPU_PIECE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

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

/* Physical memory for one chunk, mapped at its address. An error: nothing has changed. */
CUresult vgpu_chunk_map(struct vgpu_piece *piece, unsigned chunk);
void vgpu_chunk_unmap(struct vgpu_piece *piece, unsigned chunk);

/* The list of all, newest first, for a caller that has made sure that no thread is inside (swap.h). */
struct vgpu_piece *vgpu_pieces(void);

void vgpu_piece_link(struct vgpu_piece *piece);
void vgpu_piece_unlink(struct vgpu_piece *piece);

/* The first that `match` says, unlinked if `take`; NULL: none. The list is locked while `match` is asked. */
struct vgpu_piece *vgpu_piece_find(bool (*match)(const struct vgpu_piece *piece, void *argument), void *argument,
                                   bool take);

#endif

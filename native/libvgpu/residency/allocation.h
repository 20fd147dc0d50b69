/*
 * allocation.h: the allocations that can leave the card (evictable.h): the list of them, and the physical memory behind each
 * chunk of one.
 *
 * The list has a lock of its own; an allocation's chunks are mapped and unmapped by one thread at a time.
 */
#ifndef VGPU_ALLOCATION_H
#define VGPU_ALLOCATION_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

#define VGPU_CHUNK_BYTES (128u << 20) /* copies as fast as a whole, and soon gives room to others (H200) */

struct vgpu_chunk {
    CUmemGenericAllocationHandle handle; /* 0: out */
    bool fresh;                          /* on its way in: its copy on the host is true still */
    uint64_t offset;                     /* in the host's buffer, while it is out */
};

/* One allocation. */
struct vgpu_allocation {
    struct vgpu_allocation *next;
    struct vgpu_allocation **from; /* NULL: it is not in the list */
    CUdeviceptr base;
    uint64_t bytes; /* whole pages */
    uint64_t asked;
    CUmemAllocationProp prop; /* of the physical memory of each chunk */
    int index;                /* of the device in the lease */
    CUcontext context;        /* whose end frees it, unless it is of the program */
    bool dead;                /* freed by the program, but not yet at the driver */
    bool of_program;          /* see physical.h */
    uint64_t chunk_bytes;     /* all chunks but the last */
    unsigned chunk_count;
    struct vgpu_chunk chunks[];
};

static inline uint64_t vgpu_chunk_bytes(const struct vgpu_allocation *allocation, unsigned chunk)
{
    uint64_t left = allocation->bytes - chunk * allocation->chunk_bytes;
    return left < allocation->chunk_bytes ? left : allocation->chunk_bytes;
}

static inline CUdeviceptr vgpu_chunk_base(const struct vgpu_allocation *allocation, unsigned chunk)
{
    return allocation->base + chunk * allocation->chunk_bytes;
}

/* Physical memory for one chunk, mapped at its address. An error: nothing has changed. */
CUresult vgpu_chunk_map(struct vgpu_allocation *allocation, unsigned chunk);
void vgpu_chunk_unmap(struct vgpu_allocation *allocation, unsigned chunk);

/* The list of all, newest first, for a caller that has made sure that no thread is inside (swap.h). */
struct vgpu_allocation *vgpu_allocations(void);

void vgpu_allocation_link(struct vgpu_allocation *allocation);

/* False: it is not in the list. */
bool vgpu_allocation_unlink(struct vgpu_allocation *allocation);

/* The first that `match` says, unlinked if `take`; NULL: none. The list is locked while `match` is asked. */
struct vgpu_allocation *vgpu_allocation_find(bool (*match)(const struct vgpu_allocation *allocation, void *argument),
                                             void *argument, bool take);

#endif

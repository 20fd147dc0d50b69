/*
 * allocation.h: the allocations that can leave the card (evictable.h): the list of them, and the physical memory behind
 * each of their chunks.
 *
 * The list has its own lock. Only one thread at a time maps and unmaps the chunks of an allocation.
 */
#ifndef VGPU_ALLOCATION_H
#define VGPU_ALLOCATION_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/* size of a chunk: copied as fast as a whole allocation, and small enough to give room to others soon (H200) */
#define VGPU_CHUNK_BYTES (128u << 20)

struct vgpu_chunk {
    CUmemGenericAllocationHandle handle; /* physical memory of the chunk; 0: the chunk is on the host */
    bool fresh;                          /* the chunk is being brought in: its copy on the host is still valid */
    uint64_t offset;                     /* offset of the chunk's copy in the host buffer, while the chunk is out */
};

/* An allocation that can leave the card. */
struct vgpu_allocation {
    struct vgpu_allocation *next;
    struct vgpu_allocation **from; /* NULL: the allocation is not in the list */
    CUdeviceptr base;
    uint64_t bytes; /* size in whole pages */
    uint64_t asked;
    CUmemAllocationProp prop; /* properties of the physical memory of each chunk */
    int index;                /* index of the device in the lease */
    CUcontext context;        /* the context whose end frees the memory, unless `of_program` is set */
    bool dead;                /* the program has freed the memory, but the driver has not yet */
    bool of_program;          /* the memory is the program's own cuMemCreate (physical.h) */
    uint64_t chunk_bytes;     /* size of all chunks except the last */
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

/*
 * vgpu_chunk_map: makes physical memory for one chunk and maps it at the chunk's address. If it returns an error,
 * nothing has changed.
 */
CUresult vgpu_chunk_map(struct vgpu_allocation *allocation, unsigned chunk);
void vgpu_chunk_unmap(struct vgpu_allocation *allocation, unsigned chunk);

/*
 * Returns the list of all allocations, newest first. The caller must have made sure that no thread is inside (swap.h).
 */
struct vgpu_allocation *vgpu_allocations(void);

void vgpu_allocation_link(struct vgpu_allocation *allocation);

/* Removes an allocation from the list. Returns false if it is not in the list. */
bool vgpu_allocation_unlink(struct vgpu_allocation *allocation);

/*
 * Returns the first allocation for which `match` returns true, unlinked if `take`; NULL if there is none. The list is
 * locked while `match` is called.
 */
struct vgpu_allocation *vgpu_allocation_find(bool (*match)(const struct vgpu_allocation *allocation, void *argument),
                                             void *argument, bool take);

#endif

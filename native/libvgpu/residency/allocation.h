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
#include "digest.h"
#include "hostbuf.h"

/*
 * size of a chunk: on an H200 such chunks are copied as fast as a whole allocation, and each frees room for others soon
 */
#define VGPU_CHUNK_BYTES (128u << 20)

struct vgpu_chunk {
    CUmemGenericAllocationHandle handle; /* physical memory of the chunk; 0: the chunk is on the host or parked */
    /* the swap-in under way mapped the chunk; its copy on the host is still valid */
    bool fresh;
    bool leaves; /* the eviction under way takes the chunk */
    bool parked; /* the contents are in `block` at offset `at` (parked.h) */
    unsigned block;
    uint64_t at;
    bool placed; /* the chunk has pages of the host buffer, vgpu_chunk_pages */
    bool known;  /* the pages have the contents whose digest is `digest` */
    struct vgpu_digest digest;
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
    uint32_t *pages; /* numbers of pages of the host buffer, by page of the allocation */
    struct vgpu_chunk chunks[];
};

static inline uint64_t vgpu_chunk_bytes(const struct vgpu_allocation *allocation, unsigned chunk)
{
    uint64_t left = allocation->bytes - chunk * allocation->chunk_bytes;
    return left < allocation->chunk_bytes ? left : allocation->chunk_bytes;
}

static inline unsigned vgpu_chunk_page_count(const struct vgpu_allocation *allocation, unsigned chunk)
{
    return (unsigned)((vgpu_chunk_bytes(allocation, chunk) + VGPU_HOSTBUF_PAGE_BYTES - 1) / VGPU_HOSTBUF_PAGE_BYTES);
}

static inline uint32_t *vgpu_chunk_pages(const struct vgpu_allocation *allocation, unsigned chunk)
{
    return allocation->pages + chunk * (allocation->chunk_bytes / VGPU_HOSTBUF_PAGE_BYTES);
}

static inline CUdeviceptr vgpu_chunk_base(const struct vgpu_allocation *allocation, unsigned chunk)
{
    return allocation->base + chunk * allocation->chunk_bytes;
}

/*
 * Makes a record for `bytes` in chunks of `chunk_bytes`. Returns NULL if the host has no memory for it. free() ends it,
 * after it is unlinked.
 */
struct vgpu_allocation *vgpu_allocation_make(uint64_t bytes, uint64_t chunk_bytes);

/*
 * Takes pages of the host buffer for a chunk: free pages from number *page on. Returns false, and takes none, if there
 * are too few free pages. vgpu_chunk_forget gives the pages back; the copy of the chunk is then lost.
 */
bool vgpu_chunk_place(struct vgpu_allocation *allocation, unsigned chunk, uint32_t *page);
void vgpu_chunk_forget(struct vgpu_allocation *allocation, unsigned chunk);

/*
 * vgpu_chunk_map: makes physical memory for one chunk and maps it at the chunk's address. If it returns an error,
 * nothing has changed.
 */
CUresult vgpu_chunk_map(struct vgpu_allocation *allocation, unsigned chunk);
/* Unmaps a chunk and releases its memory. It has no handle from then on; after an error the handle is not released. */
CUresult vgpu_chunk_unmap(struct vgpu_allocation *allocation, unsigned chunk);

/*
 * Returns the list of all allocations, newest first. The caller must have made sure that no thread is inside (swap.h).
 */
struct vgpu_allocation *vgpu_allocations(void);

void vgpu_allocation_link(struct vgpu_allocation *allocation);

/* Removes an allocation from the list, and its copies on the host. Returns false if it is not in the list. */
bool vgpu_allocation_unlink(struct vgpu_allocation *allocation);

/*
 * Returns the first allocation for which `match` returns true, unlinked if `take`; NULL if there is none. The list is
 * locked while `match` is called.
 */
struct vgpu_allocation *vgpu_allocation_find(bool (*match)(const struct vgpu_allocation *allocation, void *argument),
                                             void *argument, bool take);

#endif

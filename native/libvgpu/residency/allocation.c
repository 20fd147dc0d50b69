#include "allocation.h"

#include <pthread.h>
#include <stdlib.h>

#include "functions.h"
#include "in_child.h"
#include "invariant.h"

static struct vgpu_allocation *allocations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list of allocations */

struct vgpu_allocation *vgpu_allocation_make(uint64_t bytes, uint64_t chunk_bytes)
{
    uint64_t count = (bytes + chunk_bytes - 1) / chunk_bytes;
    uint64_t pages = (bytes + VGPU_HOSTBUF_PAGE_BYTES - 1) / VGPU_HOSTBUF_PAGE_BYTES;
    struct vgpu_allocation *made;
    made = calloc(1, sizeof(*made) + count * sizeof(made->chunks[0]) + pages * sizeof(made->pages[0]));
    if (made == NULL)
        return NULL;
    made->bytes = bytes;
    made->chunk_bytes = chunk_bytes;
    made->chunk_count = (unsigned)count;
    made->pages = (uint32_t *)&made->chunks[count];
    return made;
}

bool vgpu_chunk_place(struct vgpu_allocation *allocation, unsigned chunk, uint32_t *page)
{
    uint32_t *pages = vgpu_chunk_pages(allocation, chunk);
    for (unsigned i = 0; i < vgpu_chunk_page_count(allocation, chunk); i++) {
        if (!vgpu_hostbuf_take(page)) {
            while (i > 0)
                vgpu_hostbuf_give(pages[--i]);
            return false;
        }
        pages[i] = *page;
    }
    allocation->chunks[chunk].placed = true;
    return true;
}

void vgpu_chunk_forget(struct vgpu_allocation *allocation, unsigned chunk)
{
    if (!allocation->chunks[chunk].placed)
        return;
    for (unsigned i = 0; i < vgpu_chunk_page_count(allocation, chunk); i++)
        vgpu_hostbuf_give(vgpu_chunk_pages(allocation, chunk)[i]);
    allocation->chunks[chunk].placed = false;
    allocation->chunks[chunk].known = false;
}

struct vgpu_allocation *vgpu_allocations(void)
{
    return allocations;
}

void vgpu_allocation_link(struct vgpu_allocation *allocation)
{
    pthread_mutex_lock(&lock);
    allocation->next = allocations;
    allocation->from = &allocations;
    if (allocations != NULL)
        allocations->from = &allocation->next;
    allocations = allocation;
    pthread_mutex_unlock(&lock);
}

/*
 * Removes an allocation from the list, and gives back the pages of its copies on the host. Precondition: the lock is
 * held.
 */
static void unlink_allocation(struct vgpu_allocation *allocation)
{
    VGPU_ASSERT(*allocation->from == allocation);
    VGPU_ASSERT(allocation->next == NULL || allocation->next->from == &allocation->next);
    *allocation->from = allocation->next;
    if (allocation->next != NULL)
        allocation->next->from = allocation->from;
    allocation->from = NULL;
    for (unsigned i = 0; i < allocation->chunk_count; i++)
        vgpu_chunk_forget(allocation, i);
}

bool vgpu_allocation_unlink(struct vgpu_allocation *allocation)
{
    pthread_mutex_lock(&lock);
    bool linked = allocation->from != NULL;
    if (linked)
        unlink_allocation(allocation);
    pthread_mutex_unlock(&lock);
    return linked;
}

struct vgpu_allocation *vgpu_allocation_find(bool (*match)(const struct vgpu_allocation *allocation, void *argument),
                                             void *argument, bool take)
{
    pthread_mutex_lock(&lock);
    struct vgpu_allocation *allocation = allocations;
    while (allocation != NULL && !match(allocation, argument))
        allocation = allocation->next;
    if (allocation != NULL && take)
        unlink_allocation(allocation);
    pthread_mutex_unlock(&lock);
    return allocation;
}

CUresult vgpu_chunk_map(struct vgpu_allocation *allocation, unsigned chunk)
{
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access = {.location = allocation->prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    uint64_t bytes = vgpu_chunk_bytes(allocation, chunk);
    CUdeviceptr base = vgpu_chunk_base(allocation, chunk);
    CUresult result = CALL(cuMemCreate, &handle, bytes, &allocation->prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuMemMap, base, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = CALL(cuMemSetAccess, base, bytes, &access, 1);
        if (result != CUDA_SUCCESS)
            CALL(cuMemUnmap, base, bytes);
    }
    if (result != CUDA_SUCCESS)
        CALL(cuMemRelease, handle);
    else
        allocation->chunks[chunk].handle = handle;
    return result;
}

CUresult vgpu_chunk_unmap(struct vgpu_allocation *allocation, unsigned chunk)
{
    CUresult result = CALL(cuMemUnmap, vgpu_chunk_base(allocation, chunk), vgpu_chunk_bytes(allocation, chunk));
    if (result == CUDA_SUCCESS)
        CALL(cuMemRelease, allocation->chunks[chunk].handle);
    allocation->chunks[chunk].handle = 0;
    return result;
}

static void reset(void)
{
    allocations = NULL;
    pthread_mutex_init(&lock, NULL);
}
VGPU_IN_CHILD(reset);

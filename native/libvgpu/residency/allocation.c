#include "allocation.h"

#include <pthread.h>

#include "functions.h"
#include "in_child.h"
#include "invariant.h"

static struct vgpu_allocation *allocations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list of allocations */

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

/* Removes an allocation from the list. Precondition: the lock is held. */
static void unlink_allocation(struct vgpu_allocation *allocation)
{
    VGPU_ASSERT(*allocation->from == allocation);
    VGPU_ASSERT(allocation->next == NULL || allocation->next->from == &allocation->next);
    *allocation->from = allocation->next;
    if (allocation->next != NULL)
        allocation->next->from = allocation->from;
    allocation->from = NULL;
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

void vgpu_chunk_unmap(struct vgpu_allocation *allocation, unsigned chunk)
{
    CALL(cuMemUnmap, vgpu_chunk_base(allocation, chunk), vgpu_chunk_bytes(allocation, chunk));
    CALL(cuMemRelease, allocation->chunks[chunk].handle);
    allocation->chunks[chunk].handle = 0;
}

static void reset(void)
{
    allocations = NULL;
    pthread_mutex_init(&lock, NULL);
}
VGPU_IN_CHILD(reset);

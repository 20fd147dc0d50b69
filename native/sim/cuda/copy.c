/* Checks and moves bytes. Device memory is memory of this process, so a copy is a copy; what a
 * card would refuse is refused before anything is touched. */
#include "internal.h"

CUresult cu_check_device_range(CUdeviceptr p, size_t size)
{
    bool good;
    cu_lock();
    const struct cu_block *b = cu_block_at(p);
    if (b != NULL)
        good = size <= b->size - (p - b->base);
    else if (cu_in_arena(p))
        good = cu_vmm_covers(p, size);
    else
        good = cu_host_at((const void *)p) != NULL; /* page-locked memory is addressable too */
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Either side may be host or device (unified addressing). */
CUresult cu_copy(void *to, const void *from, size_t size)
{
    if (size == 0)
        return CUDA_SUCCESS;
    CU_CHECK(to != NULL && from != NULL, CUDA_ERROR_INVALID_VALUE);
    if (cu_in_arena((CUdeviceptr)to))
        CU_TRY(cu_check_device_range((CUdeviceptr)to, size));
    if (cu_in_arena((CUdeviceptr)from))
        CU_TRY(cu_check_device_range((CUdeviceptr)from, size));
    memmove(to, from, size);
    return CUDA_SUCCESS;
}

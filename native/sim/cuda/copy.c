/*
 * Checks and performs copies. Device memory is host memory of this process. A copy that a card would refuse is refused
 * before any byte is copied; a copy of several rows is checked row by row.
 */
#include "internal.h"

#define PATTERN_BYTES (16u << 10) /* whole values of each width */

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
        good = cu_host_at((const void *)p) != NULL; /* page-locked host memory is a valid device address too */
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Copies bytes; each of the two addresses may be a host or a device address (unified addressing). */
CUresult cu_copy(void *to, const void *from, size_t size)
{
    if (size == 0)
        return CUDA_SUCCESS;
    CU_CHECK(to != NULL && from != NULL, CUDA_ERROR_INVALID_VALUE);
    if (cu_in_arena((CUdeviceptr)to))
        CU_TRY(cu_check_device_range((CUdeviceptr)to, size));
    if (cu_in_arena((CUdeviceptr)from))
        CU_TRY(cu_check_device_range((CUdeviceptr)from, size));
    cu_sparse_copy(to, from, size);
    return CUDA_SUCCESS;
}

/* One side of a 2D or 3D copy: its address and its strides. */
struct side {
    char *base;
    size_t pitch, slice;
};

static CUresult side_of(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array, size_t pitch,
                        size_t height, struct side *out)
{
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        *out = (struct side){(char *)(uintptr_t)host, pitch, pitch * height};
        return host == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
        *out = (struct side){(char *)device, pitch, pitch * height};
        return device == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEMORYTYPE_ARRAY: {
        CU_CHECK(array != NULL && array->magic == CU_ARRAY, CUDA_ERROR_INVALID_HANDLE);
        size_t rows = array->shape.Height == 0 ? 1 : array->shape.Height;
        *out = (struct side){(char *)array->data, array->pitch, array->pitch * rows};
        return CUDA_SUCCESS;
    }
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cu_copy_3d(const CUDA_MEMCPY3D *c)
{
    struct side to, from;
    CU_CHECK(c != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(side_of(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, c->dstPitch, c->dstHeight, &to));
    CU_TRY(side_of(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, c->srcPitch, c->srcHeight, &from));
    for (size_t z = 0; z < c->Depth; z++) {
        for (size_t y = 0; y < c->Height; y++) {
            char *target = to.base + (c->dstZ + z) * to.slice + (c->dstY + y) * to.pitch;
            const char *source = from.base + (c->srcZ + z) * from.slice + (c->srcY + y) * from.pitch;
            CU_TRY(cu_copy(target + c->dstXInBytes, source + c->srcXInBytes, c->WidthInBytes));
        }
    }
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr to, const void *value, size_t width, size_t count)
{
    if (count == 0)
        return CUDA_SUCCESS;
    CU_CHECK(to % width == 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_check_device_range(to, width * count));
    char pattern[PATTERN_BYTES];
    size_t bytes = width * count, length = bytes < sizeof(pattern) ? bytes : sizeof(pattern);
    for (size_t i = 0; i < length; i += width)
        memcpy(pattern + i, value, width);
    cu_sparse_fill((char *)to, bytes, pattern, length);
    return CUDA_SUCCESS;
}

CUresult cu_fill_rows(CUdeviceptr to, size_t pitch, const void *value, size_t width, size_t count, size_t rows)
{
    for (size_t y = 0; y < rows; y++)
        CU_TRY(fill(to + y * pitch, value, width, count));
    return CUDA_SUCCESS;
}

/* cuMemset*, in order with their stream. */
#include "api.h"

static CUresult fill(CUdeviceptr to, const void *value, size_t width, size_t count)
{
    if (count == 0)
        return CUDA_SUCCESS;
    CU_CHECK(to % width == 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_check_device_range(to, width * count));
    char *p = (char *)to;
    if (width == 1) {
        memset(p, *(const unsigned char *)value, count);
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < count; i++)
        memcpy(p + i * width, value, width);
    return CUDA_SUCCESS;
}

static CUresult fill_rows(CUdeviceptr to, size_t pitch, const void *value, size_t width,
                          size_t count, size_t rows)
{
    for (size_t y = 0; y < rows; y++)
        CU_TRY(fill(to + y * pitch, value, width, count));
    return CUDA_SUCCESS;
}

#define SETTERS(bits, type)                                                                        \
    CUresult PTDS(cuMemsetD##bits##_v2)(CUdeviceptr to, type value, size_t count)                  \
    {                                                                                              \
        CU_TRY(enter_sync("cuMemsetD" #bits "_v2"));                                               \
        return fill(to, &value, sizeof(value), count);                                             \
    }                                                                                              \
    CUresult PTSZ(cuMemsetD##bits##Async)(CUdeviceptr to, type value, size_t count,                \
                                          CUstream stream)                                         \
    {                                                                                              \
        CUcontext ctx;                                                                             \
        CU_TRY(enter_stream("cuMemsetD" #bits "Async", stream, &ctx));                             \
        return fill(to, &value, sizeof(value), count);                                             \
    }                                                                                              \
    CUresult PTDS(cuMemsetD2D##bits##_v2)(CUdeviceptr to, size_t pitch, type value, size_t width,  \
                                          size_t rows)                                             \
    {                                                                                              \
        CU_TRY(enter_sync("cuMemsetD2D" #bits "_v2"));                                             \
        return fill_rows(to, pitch, &value, sizeof(value), width, rows);                           \
    }                                                                                              \
    CUresult PTSZ(cuMemsetD2D##bits##Async)(CUdeviceptr to, size_t pitch, type value,              \
                                            size_t width, size_t rows, CUstream stream)            \
    {                                                                                              \
        CUcontext ctx;                                                                             \
        CU_TRY(enter_stream("cuMemsetD2D" #bits "Async", stream, &ctx));                           \
        return fill_rows(to, pitch, &value, sizeof(value), width, rows);                           \
    }

SETTERS(8, unsigned char)
SETTERS(16, unsigned short)
SETTERS(32, unsigned int)

/* CUDA arrays and mipmapped arrays: rows of pitch-aligned memory. */
#include "internal.h"

#define ROW_ALIGN 512u

size_t cu_element_bytes(CUarray_format format, unsigned int channels)
{
    size_t one;
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        one = 1;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        one = 2;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        one = 4;
        break;
    default:
        return 0;
    }
    return channels == 1 || channels == 2 || channels == 4 ? one * channels : 0;
}

static size_t at_least_one(size_t n)
{
    return n == 0 ? 1 : n;
}

/* Computes the number of bytes of one row, and of the whole array. */
static CUresult extent(const CUDA_ARRAY3D_DESCRIPTOR *shape, size_t *pitch, size_t *size)
{
    size_t element = cu_element_bytes(shape->Format, shape->NumChannels);
    CU_CHECK(element > 0 && shape->Width > 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(shape->Width <= 131072 && shape->Height <= 65536 && shape->Depth <= 16384, CUDA_ERROR_INVALID_VALUE);
    *pitch = (shape->Width * element + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
    size_t rows = at_least_one(shape->Height) * at_least_one(shape->Depth);
    return __builtin_mul_overflow(*pitch, rows, size) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult make(CUcontext ctx, const CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray *out)
{
    size_t pitch, size;
    CU_TRY(extent(shape, &pitch, &size));
    CUarray a = calloc(1, sizeof(*a));
    CU_CHECK(a != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *a = (struct CUarray_st){CU_ARRAY, *shape, 0, pitch, false, cu_owner_of(ctx)};
    CUresult result = cu_alloc(ctx, SIM_ARRAY, NULL, size, &a->data);
    if (result == CUDA_SUCCESS)
        *out = a;
    else
        free(a);
    return result;
}

CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuArray3DCreate_v2", &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(out != NULL && shape != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = make(ctx, shape, out);
    cu_unlock();
    return result;
}

CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    CU_CHECK(shape != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = shape->Width, .Height = shape->Height, .Format = shape->Format, .NumChannels = shape->NumChannels};
    return cuArray3DCreate_v2(out, &full);
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray array)
{
    CU_TRY(cu_enter("cuArray3DGetDescriptor_v2"));
    CU_CHECK(array != NULL && array->magic == CU_ARRAY, CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(cu_owned(&array->owner), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    CU_CHECK(shape != NULL, CUDA_ERROR_INVALID_VALUE);
    *shape = array->shape;
    return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *shape, CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR full;
    CU_CHECK(shape != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cuArray3DGetDescriptor_v2(&full, array));
    *shape = (CUDA_ARRAY_DESCRIPTOR){full.Width, full.Height, full.Format, full.NumChannels};
    return CUDA_SUCCESS;
}

static void unmake(CUarray array)
{
    if (!array->part)
        cu_free(array->data);
    array->magic = CU_DEAD;
    free(array);
}

CUresult cuArrayDestroy(CUarray array)
{
    CU_TRY(cu_enter("cuArrayDestroy"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(array != NULL && array->magic == CU_ARRAY && !array->part, CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(cu_owned(&array->owner), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    cu_lock();
    unmake(array);
    cu_unlock();
    return CUDA_SUCCESS;
}

struct CUmipmappedArray_st {
    uint32_t magic;
    struct cu_owner owner;
    unsigned int level_count;
    CUarray *levels;
    CUdeviceptr data; /* memory of all levels, one after another */
};

bool cu_is_mipmap(CUmipmappedArray mipmap)
{
    return mipmap != NULL && mipmap->magic == CU_MIPMAP;
}

static void unmake_mipmap(CUmipmappedArray mipmap)
{
    for (unsigned int i = 0; i < mipmap->level_count; i++) {
        if (mipmap->levels[i] != NULL)
            unmake(mipmap->levels[i]);
    }
    if (mipmap->data != 0)
        cu_free(mipmap->data);
    free(mipmap->levels);
    mipmap->magic = CU_DEAD;
    free(mipmap);
}

static CUDA_ARRAY3D_DESCRIPTOR half(CUDA_ARRAY3D_DESCRIPTOR shape)
{
    shape.Width = at_least_one(shape.Width / 2);
    shape.Height = shape.Height == 0 ? 0 : at_least_one(shape.Height / 2);
    shape.Depth = shape.Depth == 0 ? 0 : at_least_one(shape.Depth / 2);
    return shape;
}

static CUresult make_levels(CUcontext ctx, CUmipmappedArray mipmap, const CUDA_ARRAY3D_DESCRIPTOR *first)
{
    size_t pitch, size, sum = 0, at = 0;
    CUDA_ARRAY3D_DESCRIPTOR shape = *first;
    for (unsigned int i = 0; i < mipmap->level_count; i++, shape = half(shape)) {
        CU_TRY(extent(&shape, &pitch, &size));
        CU_CHECK(!__builtin_add_overflow(sum, size, &sum), CUDA_ERROR_OUT_OF_MEMORY);
    }
    CU_TRY(cu_alloc(ctx, SIM_ARRAY, NULL, sum, &mipmap->data));
    shape = *first;
    for (unsigned int i = 0; i < mipmap->level_count; i++, shape = half(shape), at += size) {
        CUarray level = calloc(1, sizeof(*level));
        CU_CHECK(level != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        CU_TRY(extent(&shape, &pitch, &size));
        *level = (struct CUarray_st){CU_ARRAY, shape, mipmap->data + at, pitch, true, mipmap->owner};
        mipmap->levels[i] = level;
    }
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMipmappedArrayCreate", &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(out != NULL && shape != NULL && levels > 0, CUDA_ERROR_INVALID_VALUE);
    unsigned int most = 1;
    for (size_t n = shape->Width > shape->Height ? shape->Width : shape->Height; n > 1; n /= 2)
        most++;
    CUmipmappedArray mipmap = calloc(1, sizeof(*mipmap));
    CU_CHECK(mipmap != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    mipmap->magic = CU_MIPMAP;
    mipmap->owner = cu_owner_of(ctx);
    mipmap->level_count = levels < most ? levels : most;
    mipmap->levels = calloc(mipmap->level_count, sizeof(*mipmap->levels));
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    cu_lock();
    if (mipmap->levels != NULL)
        result = make_levels(ctx, mipmap, shape);
    else
        mipmap->level_count = 0;
    if (result == CUDA_SUCCESS)
        *out = mipmap;
    else
        unmake_mipmap(mipmap);
    cu_unlock();
    return result;
}

CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray mipmap, unsigned int level)
{
    CU_TRY(cu_enter("cuMipmappedArrayGetLevel"));
    CU_CHECK(cu_is_mipmap(mipmap), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(cu_owned(&mipmap->owner), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    CU_CHECK(out != NULL && level < mipmap->level_count, CUDA_ERROR_INVALID_VALUE);
    *out = mipmap->levels[level];
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
    CU_TRY(cu_enter("cuMipmappedArrayDestroy"));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(cu_is_mipmap(mipmap), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(cu_owned(&mipmap->owner), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    cu_lock();
    unmake_mipmap(mipmap);
    cu_unlock();
    return CUDA_SUCCESS;
}

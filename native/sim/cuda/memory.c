/* Plain, pitched and managed memory, and the calls that describe an address. */
#include <unistd.h>

#include "internal.h"

#define PITCH_ALIGN 512u

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUcontext ctx;
    CU_TRY(cu_enter_locked_out("cuMemGetInfo_v2"));
    /* on an H200 with driver 580.159.04, too, the call fails at once in a checkpointed process */
    CU_CHECK(!cu_checkpointed(), CUDA_ERROR_OPERATING_SYSTEM);
    CU_TRY(cu_enter_context("cuMemGetInfo_v2", &ctx));
    CU_CHECK(free_bytes != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct cu_device *d = cu_device_of(ctx);
    sim_lock(cu.s);
    sim_sweep(cu.s);
    uint64_t capacity = sim_capacity_bytes(cu.s, d->device, d->gi);
    uint64_t used = sim_used_bytes(cu.s, d->device, d->gi);
    uint64_t left = d->gi == SIM_NONE ? sim_wall_left(cu.s, d->device, (uint32_t)getpid()) : SIM_NO_LIMIT;
    sim_unlock(cu.s);
    size_t size = 0;
    CU_TRY(cuDeviceTotalMem_v2(&size, ctx->ordinal));
    *total = size;
    *free_bytes = used < capacity ? capacity - used : 0;
    if (left < *free_bytes)
        *free_bytes = left;
    return CUDA_SUCCESS;
}

static CUresult allocate(const char *function, enum sim_kind kind, CUdeviceptr *out, size_t size)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context(function, &ctx));
    CU_CHECK(out != NULL && size > 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_capture_unsafe());
    cu_lock();
    CUresult result = cu_alloc(ctx, kind, NULL, size, out);
    cu_unlock();
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    return allocate("cuMemAlloc_v2", SIM_PLAIN, out, size);
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned int flags)
{
    CU_CHECK(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    return allocate("cuMemAllocManaged", SIM_MANAGED, out, size);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    CU_CHECK(pitch != NULL && width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    size_t row = (width + PITCH_ALIGN - 1) / PITCH_ALIGN * PITCH_ALIGN, size;
    CU_CHECK(row >= width && !__builtin_mul_overflow(row, height, &size), CUDA_ERROR_OUT_OF_MEMORY);
    CU_TRY(allocate("cuMemAllocPitch_v2", SIM_PLAIN, out, size));
    *pitch = row;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMemFree_v2", &ctx));
    if (p == 0)
        return CUDA_SUCCESS;
    CU_TRY(cu_capture_unsafe());
    CU_TRY(cu_wait(ctx, ctx->position)); /* cuMemFree synchronises */
    cu_lock();
    CUresult result = cu_free(p);
    cu_unlock();
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMemGetAddressRange_v2", &ctx));
    cu_lock();
    const struct cu_block *b = cu_block_at(p);
    if (b != NULL && base != NULL)
        *base = b->base;
    if (b != NULL && size != NULL)
        *size = b->size;
    cu_unlock();
    return b != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Reads an attribute of a pointer. False: the driver does not know the address, or its memory has no such attribute. */
static bool pointer_value(CUpointer_attribute attribute, CUdeviceptr p, void *data)
{
    const struct cu_block *b = cu_block_at(p);
    const struct cu_host *h = b == NULL ? cu_host_at((const void *)p) : NULL;
    int mapped = b == NULL ? cu_vmm_ordinal(p) : -1;
    if (b == NULL && h == NULL && mapped < 0)
        return false;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = b != NULL ? b->ctx : h != NULL ? h->ctx : NULL;
        return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)data = h != NULL ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = p;
        return true;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(void **)data = h != NULL || (b != NULL && b->kind == SIM_MANAGED) ? (void *)p : NULL;
        return h != NULL || (b != NULL && b->kind == SIM_MANAGED);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)data = b != NULL && b->kind == SIM_MANAGED;
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = b != NULL ? b->ordinal : h != NULL && h->ctx ? h->ctx->ordinal : mapped;
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = b != NULL ? b->base : h != NULL ? (CUdeviceptr)h->base : p;
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = b != NULL ? b->size : h != NULL ? h->size : SIM_PAGE_BYTES;
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(bool *)data = true;
        return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = b != NULL ? b->id : 0;
        return b != NULL;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = b != NULL ? b->pool : NULL;
        return true;
    default:
        return false;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p)
{
    CU_TRY(cu_enter_suspended("cuPointerGetAttribute"));
    CU_CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    bool known = pointer_value(attribute, p, data);
    cu_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike cuPointerGetAttribute, this call succeeds for a pointer that the driver does not know, and returns zeros. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr p)
{
    CU_TRY(cu_enter("cuPointerGetAttributes"));
    CU_CHECK(attributes != NULL && data != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    for (unsigned int i = 0; i < count; i++) {
        if (data[i] == NULL || pointer_value(attributes[i], p, data[i]))
            continue;
        size_t width = attributes[i] == CU_POINTER_ATTRIBUTE_CONTEXT ||
                               attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
                               attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER
                           ? sizeof(void *)
                           : sizeof(unsigned int);
        memset(data[i], 0, width);
    }
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemAdvise_v2(CUdeviceptr p, size_t size, CUmem_advise advice, CUmemLocation location)
{
    CU_TRY(cu_enter("cuMemAdvise_v2"));
    (void)advice;
    (void)location;
    cu_lock();
    const struct cu_block *b = cu_block_at(p);
    bool good = b != NULL && b->kind == SIM_MANAGED && size <= b->size;
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAdvise(CUdeviceptr p, size_t size, CUmem_advise advice, CUdevice dev)
{
    return cuMemAdvise_v2(p, size, advice, (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev});
}

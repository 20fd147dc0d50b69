/*
 * Memory that another API made and that a process imports by file descriptor. A simulated node has no other API, so
 * only an exported VMM allocation (vmm.c) can be imported; a real driver accepts that too. The memory stays charged to
 * the process that made it.
 */
#include <unistd.h>

#include "internal.h"

struct CUextMemory_st {
    uint32_t magic;
    CUcontext ctx;
    int fd; /* file descriptor, which the driver owns since the import */
    uint64_t size;
};

static bool is_external(CUexternalMemory memory)
{
    return memory != NULL && memory->magic == CU_EXTERNAL;
}

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    CUcontext ctx;
    uint64_t size;
    CU_TRY(cu_enter_context("cuImportExternalMemory", &ctx));
    CU_CHECK(out != NULL && desc != NULL && desc->size > 0 && desc->type >= CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(desc->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, CUDA_ERROR_NOT_SUPPORTED);
    CU_CHECK((desc->flags & ~(unsigned)CUDA_EXTERNAL_MEMORY_DEDICATED) == 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(cu_vmm_exported(desc->handle.fd, &size), CUDA_ERROR_UNKNOWN); /* the file is not memory of the driver */
    CU_CHECK(desc->size <= size, CUDA_ERROR_INVALID_VALUE);
    CUexternalMemory memory = calloc(1, sizeof(*memory));
    CU_CHECK(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *memory = (struct CUextMemory_st){CU_EXTERNAL, ctx, desc->handle.fd, desc->size};
    cu_lock();
    cu_cannot_suspend(1);
    cu_unlock();
    *out = memory;
    return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    CU_TRY(cu_enter("cuExternalMemoryGetMappedBuffer"));
    CU_CHECK(is_external(memory), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(out != NULL && desc != NULL && desc->flags == 0 && desc->size > 0 && desc->size <= memory->size &&
                 desc->offset <= memory->size - desc->size,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(cu_is_context(memory->ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    cu_lock();
    CUresult result = cu_block_import(memory->ctx, NULL, memory->fd, desc->offset, desc->size, out);
    if (result == CUDA_SUCCESS)
        cu_block_at(*out)->external = true;
    cu_unlock();
    return result;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    CU_TRY(cu_enter("cuDestroyExternalMemory"));
    CU_CHECK(is_external(memory), CUDA_ERROR_INVALID_HANDLE);
    close(memory->fd);
    memory->magic = CU_DEAD;
    free(memory);
    cu_lock();
    cu_cannot_suspend(-1);
    cu_unlock();
    return CUDA_SUCCESS;
}

/*
 * Memory pools that another process has exported. The exported descriptor is a small file with the identity of the
 * owner's memory file (arena.c), which the importing process opens through /proc, as ipc.c does. Imported memory stays
 * charged to its owner alone.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define POOL_MAGIC 0x706f6f31u
#define POINTER_MAGIC 0x706f6f32u

struct pool_share { /* content of the exported file */
    struct cu_pool_origin origin;
    uint64_t inode;
    uint32_t magic, device;
    int32_t fd;
};

struct pointer_share { /* content of a CUmemPoolPtrExportData */
    struct cu_pool_origin origin;
    uint64_t offset, size;
    uint32_t magic;
};
_Static_assert(sizeof(struct pointer_share) <= sizeof(CUmemPoolPtrExportData), "it has 64 bytes");

static bool is_pool(CUmemoryPool pool)
{
    return pool != NULL && pool->magic == CU_POOL;
}

static bool same(const struct cu_pool_origin *a, const struct cu_pool_origin *b)
{
    return a->pid == b->pid && a->start_ticks == b->start_ticks && a->id == b->id;
}

static CUresult give(CUmemoryPool pool, int *out)
{
    struct stat file;
    uint64_t offset;
    struct pool_share share = {.origin = pool->origin,
                               .magic = POOL_MAGIC,
                               .device = cu.devices[pool->ordinal].device,
                               .fd = cu_arena_file(0, &offset)};
    CU_CHECK(share.fd >= 0 && fstat(share.fd, &file) == 0, CUDA_ERROR_NOT_SUPPORTED);
    share.inode = file.st_ino;
    int fd = memfd_create("vgpu-sim-pool", MFD_CLOEXEC);
    CU_CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    if (write(fd, &share, sizeof(share)) != sizeof(share)) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    cu_cannot_suspend(pool->shared ? 0 : 1);
    pool->shared = true;
    *out = fd;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType type,
                                          unsigned long long flags)
{
    CU_TRY(cu_enter("cuMemPoolExportToShareableHandle"));
    CU_CHECK(out != NULL && is_pool(pool) && flags == 0 && !pool->imported &&
                 type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && pool->handle_types == type,
             CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = give(pool, out);
    cu_unlock();
    return result;
}

/* Opens the memory file of the process that exported the pool, while that process runs. Returns -1 otherwise. */
static int open_memory(const struct pool_share *share)
{
    char path[64];
    struct stat file;
    if (sim_start_ticks(share->origin.pid, NULL) != share->origin.start_ticks)
        return -1;
    snprintf(path, sizeof(path), "/proc/%u/fd/%d", share->origin.pid, share->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &file) != 0 || file.st_ino != share->inode)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int ordinal_of(uint32_t device)
{
    for (int i = 0; i < cu.device_count; i++)
        if (cu.devices[i].device == device)
            return i;
    return -1;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, CUmemAllocationHandleType type,
                                            unsigned long long flags)
{
    struct pool_share share;
    int fd = (int)(intptr_t)handle;
    CU_TRY(cu_enter("cuMemPoolImportFromShareableHandle"));
    CU_CHECK(out != NULL && flags == 0 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(pread(fd, &share, sizeof(share), 0) == sizeof(share) && share.magic == POOL_MAGIC,
             CUDA_ERROR_INVALID_VALUE);
    int ordinal = ordinal_of(share.device);
    CU_CHECK(ordinal >= 0, CUDA_ERROR_INVALID_DEVICE);
    int memory = open_memory(&share);
    CU_CHECK(memory >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    cu_lock();
    CUmemoryPool pool = cu_pool_new(ordinal, false);
    if (pool != NULL) {
        pool->imported = pool->shared = true;
        pool->memory = memory;
        pool->origin = share.origin;
        cu_cannot_suspend(1);
        *out = pool;
    }
    cu_unlock();
    if (pool == NULL)
        close(memory);
    return pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult describe(CUdeviceptr p, struct pointer_share *share)
{
    const struct cu_block *b = cu_block_at(p);
    CU_CHECK(b != NULL && b->base == p && b->pool != NULL && !b->imported && b->pool->handle_types != 0,
             CUDA_ERROR_INVALID_VALUE);
    *share = (struct pointer_share){.origin = b->pool->origin, .size = b->size, .magic = POINTER_MAGIC};
    return cu_arena_file(p, &share->offset) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr p)
{
    struct pointer_share share;
    CU_TRY(cu_enter("cuMemPoolExportPointer"));
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = describe(p, &share);
    cu_unlock();
    CU_TRY(result);
    memset(out, 0, sizeof(*out));
    memcpy(out, &share, sizeof(share));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    struct pointer_share share;
    CU_TRY(cu_enter("cuMemPoolImportPointer"));
    CU_CHECK(out != NULL && data != NULL && is_pool(pool) && pool->imported, CUDA_ERROR_INVALID_VALUE);
    memcpy(&share, data, sizeof(share));
    CU_CHECK(share.magic == POINTER_MAGIC && same(&share.origin, &pool->origin), CUDA_ERROR_INVALID_VALUE);
    CUcontext ctx = cu_current();
    if (!cu_is_context(ctx) || ctx->ordinal != pool->ordinal)
        ctx = cu.devices[pool->ordinal].primary;
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    cu_lock();
    CUresult result = cu_block_import(ctx, pool, pool->memory, share.offset, share.size, out);
    cu_unlock();
    return result;
}

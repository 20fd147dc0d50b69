/*
 * Memory of another process, by a handle of 64 bytes: which process, and where in the file behind its addresses
 * (arena.c). The memory is opened through /proc, so both processes must be of one user and one pid namespace. It stays
 * charged to the process that allocated it, and to that process alone.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define IPC_MAGIC 0x69706331u

struct ipc_handle {
    uint32_t magic, pid;
    uint64_t start_ticks, inode, offset, size;
    int32_t fd;
    uint32_t device;
    uint64_t id;
};
_Static_assert(sizeof(struct ipc_handle) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

struct opened {
    struct ipc_handle handle;
    CUcontext ctx;
    CUdeviceptr at;
    uint32_t refs;
    struct opened *next;
};

struct given {
    CUdeviceptr at;
    struct given *next;
};

static struct opened *g_opened;
static struct given *g_given; /* memory of this process for which it gave a handle away */

static struct opened **opened_at(CUdeviceptr p)
{
    struct opened **at = &g_opened;
    while (*at != NULL && (*at)->at != p)
        at = &(*at)->next;
    return at;
}

static struct given **given_at(CUdeviceptr p)
{
    struct given **at = &g_given;
    while (*at != NULL && (*at)->at != p)
        at = &(*at)->next;
    return at;
}

/* Invalidates the handles of a block that the process frees. */
static void forget(const struct cu_block *b)
{
    if (cu.ipc_memories == 0)
        return;
    struct opened **opened = opened_at(b->base), *o = *opened;
    struct given **given = given_at(b->base), *g = *given;
    if (o != NULL) {
        *opened = o->next;
        free(o);
        cu_shares_by_ipc(-1);
    }
    if (g != NULL) {
        *given = g->next;
        free(g);
        cu_shares_by_ipc(-1);
    }
}
CU_AT_END(cu_block_end, cu_block_ends, forget);

static CUresult describe(const struct cu_block *b, struct ipc_handle *out)
{
    struct stat file;
    *out = (struct ipc_handle){.magic = IPC_MAGIC,
                               .pid = (uint32_t)getpid(),
                               .start_ticks = cu.proc->start_ticks,
                               .size = b->size,
                               .device = cu.devices[b->ordinal].device,
                               .id = b->id};
    out->fd = cu_arena_file(b->base, &out->offset);
    if (out->fd < 0 || fstat(out->fd, &file) != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    out->inode = file.st_ino;
    return CUDA_SUCCESS;
}

static CUresult give(CUdeviceptr p, CUipcMemHandle *handle)
{
    struct ipc_handle given;
    const struct cu_block *b = cu_block_at(p);
    CU_CHECK(b != NULL && b->kind == SIM_PLAIN && !b->imported, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(describe(b, &given));
    if (*given_at(b->base) == NULL) {
        struct given *g = calloc(1, sizeof(*g));
        CU_CHECK(g != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        *g = (struct given){b->base, g_given};
        g_given = g;
        cu_shares_by_ipc(1);
    }
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &given, sizeof(given));
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr p)
{
    CU_TRY(cu_enter("cuIpcGetMemHandle"));
    CU_CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = give(p, handle);
    cu_unlock();
    return result;
}

/* Opens the file of the process that gave the handle; fails if that process has ended. */
static int open_file(const struct ipc_handle *h)
{
    char path[64];
    struct stat file;
    if (sim_start_ticks(h->pid, NULL) != h->start_ticks)
        return -1;
    snprintf(path, sizeof(path), "/proc/%u/fd/%d", h->pid, h->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &file) != 0 || file.st_ino != h->inode)) {
        close(fd);
        return -1;
    }
    return fd;
}

static CUresult open_locked(CUcontext ctx, const struct ipc_handle *h, CUdeviceptr *p)
{
    for (struct opened *o = g_opened; o != NULL; o = o->next) {
        if (o->ctx != ctx || memcmp(&o->handle, h, sizeof(*h)) != 0)
            continue;
        o->refs++;
        *p = o->at;
        return CUDA_SUCCESS;
    }
    struct opened *o = calloc(1, sizeof(*o));
    CU_CHECK(o != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    int fd = open_file(h);
    CUresult result = fd < 0 ? CUDA_ERROR_MAP_FAILED : cu_block_import(ctx, NULL, fd, h->offset, h->size, &o->at);
    if (fd >= 0)
        close(fd);
    if (result != CUDA_SUCCESS) {
        free(o);
        return result;
    }
    *p = o->at;
    *o = (struct opened){.handle = *h, .ctx = ctx, .at = o->at, .refs = 1, .next = g_opened};
    g_opened = o;
    cu_shares_by_ipc(1);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle handle, unsigned int flags)
{
    CUcontext ctx;
    struct ipc_handle h;
    CU_TRY(cu_enter_context("cuIpcOpenMemHandle_v2", &ctx));
    memcpy(&h, &handle, sizeof(h));
    CU_CHECK(p != NULL && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(h.magic == IPC_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    /* refuses the process's own handle, as the driver does */
    CU_CHECK(h.pid != (uint32_t)getpid(), CUDA_ERROR_INVALID_CONTEXT);
    cu_lock();
    CUresult result = open_locked(ctx, &h, p);
    cu_unlock();
    return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *p, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(p, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
    CU_TRY(cu_enter("cuIpcCloseMemHandle"));
    cu_lock();
    struct opened *o = *opened_at(p);
    if (o != NULL && --o->refs == 0)
        cu_block_close(cu_block_at(p)); /* cu_block_close frees `o` */
    cu_unlock();
    return o != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

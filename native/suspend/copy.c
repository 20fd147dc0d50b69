#include "copy.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "driver.h"
#include "lease.h"

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#define PIECE_BYTES (64ull << 20)
#define PIECES 2u /* number of pieces that are copied at a time, each through its own part of the buffer */
#define BLOCKS 2u /* number of blocks that are copied at a time: one is mapped while the other is copied */

/* An end of the copies: a device with its primary context. */
struct end {
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUevent events[PIECES];
};

/* A block that is being copied: its old and its new memory, each mapped for its own device. */
struct block {
    bool used;
    uint64_t bytes;
    CUmemGenericAllocationHandle handles[2];
    CUdeviceptr bases[2];
    CUevent done;
};

static struct {
    CUuuid uuids[2];
    struct end ends[2]; /* 0: the device that is left */
    CUdeviceptr buffer; /* memory of the second device, which both devices can write */
    struct block blocks[BLOCKS];
    enum { FAR, REACHED, OPENING, OPENED } progress;
    pthread_t opener; /* the thread that makes the contexts and the buffer */
    CUresult opened;  /* the result of that thread */
} way;

/*
 * Maps memory for `count` ends from `first` on. The memory of a block is mapped for its own device only: mapping it for
 * both made a move slower by some 20 ms for each block of 512 MiB (two H200; inferred from whole moves). So each piece
 * is copied over the link into the buffer, and from there to its new place.
 */
static CUresult map(CUdeviceptr *base, uint64_t bytes, CUmemGenericAllocationHandle handle, unsigned first,
                    unsigned count)
{
    CUmemAccessDesc access[2] = {0};
    for (unsigned i = 0; i < count; i++)
        access[i] = (CUmemAccessDesc){
            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = way.ends[first + i].device},
            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
    CUresult result = cuda_copy.reserve(base, bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = cuda_copy.map(*base, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = cuda_copy.access(*base, bytes, access, count);
        if (result != CUDA_SUCCESS)
            cuda_copy.unmap(*base, bytes);
    }
    if (result != CUDA_SUCCESS)
        cuda_copy.unreserve(*base, bytes);
    return result;
}

static void unmap(CUdeviceptr base, uint64_t bytes)
{
    cuda_copy.unmap(base, bytes);
    cuda_copy.unreserve(base, bytes);
}

static CUresult find(const CUuuid *uuid, CUdevice *device)
{
    int count = 0;
    CUuuid other;
    CUresult result = cuda_copy.count(&count);
    for (int i = 0; result == CUDA_SUCCESS && i < count; i++)
        if (cuda_copy.device(device, i) == CUDA_SUCCESS && cuda_copy.uuid(&other, *device) == CUDA_SUCCESS &&
            memcmp(&other, uuid, sizeof(other)) == 0)
            return CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result;
}

static CUresult open_end(struct end *end, struct block *blocks)
{
    CUresult result = cuda_copy.retain(&end->context, end->device);
    if (result == CUDA_SUCCESS)
        result = cuda_copy.current(end->context);
    if (result == CUDA_SUCCESS)
        result = cuda_copy.stream(&end->stream, CU_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < PIECES && result == CUDA_SUCCESS; i++)
        result = cuda_copy.event(&end->events[i], CU_EVENT_DISABLE_TIMING);
    for (unsigned i = 0; blocks != NULL && i < BLOCKS && result == CUDA_SUCCESS; i++)
        result = cuda_copy.event(&blocks[i].done, CU_EVENT_DISABLE_TIMING);
    return result;
}

static CUresult make_buffer(void)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = way.ends[1].device}};
    CUresult result = cuda_copy.create(&handle, PIECES * PIECE_BYTES, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    bool same = way.ends[0].device == way.ends[1].device;
    result = map(&way.buffer, PIECES * PIECE_BYTES, handle, same ? 1 : 0, same ? 1 : 2);
    cuda_copy.release(handle); /* the mapping keeps the memory */
    return result;
}

static void *open_ends(void *unused)
{
    (void)unused;
    way.opened = open_end(&way.ends[0], NULL);
    if (way.opened == CUDA_SUCCESS)
        way.opened = open_end(&way.ends[1], way.blocks);
    if (way.opened == CUDA_SUCCESS)
        way.opened = make_buffer();
    return NULL;
}

CUresult copy_reach(int pidfd, const CUuuid *from, const CUuuid *to)
{
    int reaches = 1;
    /*
     * asks for a descriptor that does not exist: the kernel checks the permission first, so EBADF says that this program
     * may copy descriptors of the process
     */
    if (syscall(SYS_pidfd_getfd, pidfd, INT_MAX, 0) >= 0 || errno != EBADF || !driver_copies())
        return CUDA_ERROR_NOT_SUPPORTED;
    if (way.progress != FAR)
        return memcmp(&way.uuids[0], from, sizeof(*from)) == 0 && memcmp(&way.uuids[1], to, sizeof(*to)) == 0
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    CUresult result = find(from, &way.ends[0].device);
    if (result == CUDA_SUCCESS)
        result = find(to, &way.ends[1].device);
    if (result == CUDA_SUCCESS && way.ends[0].device != way.ends[1].device)
        result = cuda_copy.reaches(&reaches, way.ends[0].device, way.ends[1].device);
    if (result != CUDA_SUCCESS || !reaches)
        return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result;
    way.uuids[0] = *from;
    way.uuids[1] = *to;
    way.progress = REACHED;
    return CUDA_SUCCESS;
}

void copy_open(void)
{
    if (way.progress != REACHED)
        return;
    way.progress = OPENING;
    if (pthread_create(&way.opener, NULL, open_ends, NULL) == 0)
        return;
    open_ends(NULL);
    way.progress = OPENED;
}

void copy_wait(void)
{
    if (way.progress != OPENING)
        return;
    pthread_join(way.opener, NULL);
    way.progress = OPENED;
}

/* Imports the memory to which a descriptor of the process refers. */
static CUresult import(int pidfd, int number, CUmemGenericAllocationHandle *handle)
{
    int fd = number < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, number, 0);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuda_copy.import(handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    return result;
}

static void close_end(const struct block *block, unsigned end)
{
    unmap(block->bases[end], block->bytes);
    cuda_copy.release(block->handles[end]);
}

/* Waits until a block is copied, and releases it. */
static CUresult finish(struct block *block)
{
    CUresult result = block->used ? cuda_copy.wait(block->done) : CUDA_SUCCESS;
    for (unsigned i = 0; i < 2 && block->used; i++)
        close_end(block, i);
    block->used = false;
    return result;
}

static CUresult open_block(int pidfd, const struct vgpu_parked_block *pair, struct block *block)
{
    const int numbers[2] = {pair->from, pair->to};
    CUresult result = CUDA_SUCCESS;
    block->bytes = pair->bytes;
    for (unsigned i = 0; i < 2 && result == CUDA_SUCCESS; i++) {
        result = import(pidfd, numbers[i], &block->handles[i]);
        if (result == CUDA_SUCCESS) {
            result = map(&block->bases[i], block->bytes, block->handles[i], i, 1);
            if (result != CUDA_SUCCESS)
                cuda_copy.release(block->handles[i]);
        }
        if (result != CUDA_SUCCESS && i == 1)
            close_end(block, 0);
    }
    return result;
}

/*
 * Copies a piece on one end: into the buffer, or from it. It begins when the other end's last copy of this part of the
 * buffer has ended.
 */
static CUresult copy_piece(unsigned end, unsigned piece, CUdeviceptr to, CUdeviceptr from, uint64_t bytes)
{
    struct end *here = &way.ends[end], *there = &way.ends[1 - end];
    CUresult result = cuda_copy.current(here->context);
    if (result == CUDA_SUCCESS)
        result = cuda_copy.after(here->stream, there->events[piece], 0);
    if (result == CUDA_SUCCESS)
        result = cuda_copy.copy(to, from, bytes, here->stream);
    if (result == CUDA_SUCCESS)
        result = cuda_copy.record(here->events[piece], here->stream);
    return result;
}

static CUresult copy_block(int pidfd, const struct vgpu_parked_block *pair, struct block *block)
{
    static unsigned piece;
    CUresult result = open_block(pidfd, pair, block);
    if (result != CUDA_SUCCESS)
        return result;
    block->used = true;
    for (uint64_t at = 0; at < block->bytes && result == CUDA_SUCCESS; at += PIECE_BYTES) {
        uint64_t left = block->bytes - at, bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
        CUdeviceptr buffer = way.buffer + piece * PIECE_BYTES;
        result = copy_piece(0, piece, buffer, block->bases[0] + at, bytes);
        if (result == CUDA_SUCCESS)
            result = copy_piece(1, piece, block->bases[1] + at, buffer, bytes);
        piece = (piece + 1) % PIECES;
    }
    CUresult recorded = cuda_copy.record(block->done, way.ends[1].stream);
    return result == CUDA_SUCCESS ? recorded : result;
}

/* Writes to the list how many blocks are copied: the process takes each block as soon as it is copied. */
static CUresult tell(int list, uint32_t copied)
{
    off_t at = offsetof(struct vgpu_parked_list, copied);
    return pwrite(list, &copied, sizeof(copied), at) == sizeof(copied) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult copy_all(int pidfd, int list, const struct vgpu_parked_block *pairs, uint32_t count)
{
    /* makes the context current in this thread, because another thread has made it */
    CUresult result = cuda_copy.current(way.ends[1].context);
    for (uint32_t i = 0; i < count + BLOCKS && result == CUDA_SUCCESS; i++) {
        result = finish(&way.blocks[i % BLOCKS]);
        if (result == CUDA_SUCCESS && i >= BLOCKS)
            result = tell(list, i - BLOCKS + 1);
        if (result == CUDA_SUCCESS && i < count)
            result = copy_block(pidfd, &pairs[i], &way.blocks[i % BLOCKS]);
    }
    for (unsigned i = 0; i < BLOCKS; i++)
        finish(&way.blocks[i]);
    return result;
}

CUresult copy_list(int pidfd, int number)
{
    struct vgpu_parked_list head;
    struct vgpu_parked_block *pairs = NULL;
    copy_open();
    copy_wait();
    if (way.opened != CUDA_SUCCESS)
        return way.opened;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    int fd = number < 0 || way.progress != OPENED ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, number, 0);
    int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS); /* a sealed file is in memory, so that no read of it waits */
    if (seals >= 0 && (seals & F_SEAL_SHRINK) && pread(fd, &head, sizeof(head), 0) == sizeof(head) &&
        head.magic == VGPU_PARKED_MAGIC && head.result == VGPU_PARKED_ASKED && head.count <= VGPU_PARKED_MAX)
        pairs = calloc(head.count + 1, sizeof(*pairs));
    ssize_t bytes = pairs == NULL ? 0 : (ssize_t)(head.count * sizeof(*pairs));
    if (pairs != NULL && pread(fd, pairs, (size_t)bytes, sizeof(head)) == bytes) {
        result = copy_all(pidfd, fd, pairs, head.count);
        head.result = (uint32_t)result;
        if (pwrite(fd, &head.result, sizeof(head.result), offsetof(struct vgpu_parked_list, result)) !=
            sizeof(head.result))
            result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    free(pairs);
    if (fd >= 0)
        close(fd);
    return result;
}

#include "parked.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "allocation.h"
#include "functions.h"
#include "in_child.h"
#include "lease.h"

/*
 * Size of a block: to map one takes 1 ms from 512 MiB to 2 GiB (H200). Where the device has no room for such a block
 * beside the memory itself, blocks are smaller.
 */
#define BLOCK_BYTES (2ull << 30)
#define SMALL_BLOCK_BYTES (128ull << 20)
#define LOOK_NS 200000 /* interval of looking for copied blocks */

static struct block {
    int fd;
    CUmemGenericAllocationHandle handle; /* 0: the process has only the descriptor */
    uint64_t bytes;
} blocks[VGPU_PARKED_MAX];
static unsigned count;
/* number of blocks on the old device whose chunks are back on the new one; if above 0, `count` is 0 */
static unsigned behind;
static CUuuid home; /* device of the blocks; all zero: this process cannot import them */
static uint32_t *asks;

static CUuuid here(void)
{
    CUdevice device;
    CUuuid uuid = {0};
    if (CALL(cuCtxGetDevice, &device) != CUDA_SUCCESS || CALL(cuDeviceGetUuid_v2, &uuid, device) != CUDA_SUCCESS)
        memset(&uuid, 0, sizeof(uuid));
    return uuid;
}

/*
 * Moves a descriptor above the standard ones, which a program might replace, and makes it close-on-exec. Returns the
 * new one, or -1.
 */
static int kept(int fd)
{
    int above = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (fd >= 0)
        close(fd);
    return above;
}

static CUresult make_block(struct block *block, uint64_t bytes)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = vgpu_allocations()->prop.location};
    int fd = -1;
    *block = (struct block){.fd = -1, .bytes = bytes};
    CUresult result = CALL(cuMemCreate, &block->handle, bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuMemExportToShareableHandle, &fd, block->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    block->fd = result == CUDA_SUCCESS ? kept(fd) : -1;
    if (block->fd >= 0)
        return CUDA_SUCCESS;
    CALL(cuMemRelease, block->handle);
    return result == CUDA_SUCCESS ? CUDA_ERROR_OPERATING_SYSTEM : result;
}

static void let_handle_go(struct block *block)
{
    if (block->handle != 0)
        CALL(cuMemRelease, block->handle);
    block->handle = 0;
}

static void end_block(struct block *block)
{
    let_handle_go(block);
    close(block->fd);
}

static CUresult map_block(const struct block *block, CUdeviceptr *base)
{
    CUmemAccessDesc access = {.location = vgpu_allocations()->prop.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result = CALL(cuMemAddressReserve, base, block->bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuMemMap, *base, block->bytes, 0, block->handle, 0);
    if (result == CUDA_SUCCESS) {
        result = CALL(cuMemSetAccess, *base, block->bytes, &access, 1);
        if (result != CUDA_SUCCESS)
            CALL(cuMemUnmap, *base, block->bytes);
    }
    if (result != CUDA_SUCCESS)
        CALL(cuMemAddressFree, *base, block->bytes);
    return result;
}

static void unmap_block(const struct block *block, CUdeviceptr base)
{
    CALL(cuMemUnmap, base, block->bytes);
    CALL(cuMemAddressFree, base, block->bytes);
}

/*
 * Marks the chunks of the next block (vgpu_chunk.leaves): up to `most` bytes, but at least one chunk. A chunk is not
 * divided. Returns the size of these chunks in bytes; 0: no chunk is left.
 */
static uint64_t choose(uint64_t most)
{
    uint64_t bytes = 0;
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++) {
            struct vgpu_chunk *chunk = &allocation->chunks[i];
            uint64_t size = vgpu_chunk_bytes(allocation, i);
            chunk->leaves = chunk->handle != 0 && (bytes == 0 || bytes + size <= most);
            if (!chunk->leaves)
                continue;
            chunk->block = count;
            chunk->at = bytes;
            bytes += size;
        }
    return bytes;
}

static CUresult fill_block(CUdeviceptr base, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count && result == CUDA_SUCCESS; i++)
            if (allocation->chunks[i].leaves)
                result = CALL(cuMemcpyDtoDAsync_v2, base + allocation->chunks[i].at, vgpu_chunk_base(allocation, i),
                              vgpu_chunk_bytes(allocation, i), stream);
    CUresult done = CALL(cuStreamSynchronize, stream);
    return result == CUDA_SUCCESS ? done : result;
}

static void unmap_chunks(void)
{
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++)
            if (allocation->chunks[i].leaves) {
                vgpu_chunk_unmap(allocation, i);
                allocation->chunks[i].parked = true;
            }
}

static CUresult park(uint64_t bytes, CUstream stream)
{
    struct block *block = &blocks[count];
    CUdeviceptr base;
    CUresult result = make_block(block, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    result = map_block(block, &base);
    if (result == CUDA_SUCCESS) {
        result = fill_block(base, stream);
        unmap_block(block, base);
    }
    if (result != CUDA_SUCCESS) {
        end_block(block);
        return result;
    }
    unmap_chunks();
    let_handle_go(block);
    count++;
    return CUDA_SUCCESS;
}

void vgpu_parked_out(CUstream stream)
{
    uint64_t bytes, most = BLOCK_BYTES;
    vgpu_parked_end();
    if (count > 0)
        return; /* the blocks of an interrupted eviction are still parked */
    home = here();
    while (count < VGPU_PARKED_MAX && most >= SMALL_BLOCK_BYTES && (bytes = choose(most)) > 0)
        if (park(bytes, stream) != CUDA_SUCCESS)
            most /= 4;
}

/*
 * Writes a list of pairs, the last one first: each parked block, and the new block that is to get its contents. Returns
 * a descriptor of it, or -1.
 */
static int write_list(const struct block *made)
{
    struct vgpu_parked_list head = {.magic = VGPU_PARKED_MAGIC, .count = count, .result = VGPU_PARKED_ASKED};
    int fd = kept((int)syscall(SYS_memfd_create, "vgpu-parked", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    bool good = fd >= 0 && pwrite(fd, &head, sizeof(head), 0) == sizeof(head);
    for (unsigned i = 0; i < count && good; i++) {
        unsigned block = count - 1 - i;
        struct vgpu_parked_block pair = {.from = blocks[block].fd, .to = made[block].fd, .bytes = blocks[block].bytes};
        good = pwrite(fd, &pair, sizeof(pair), (off_t)(sizeof(head) + i * sizeof(pair))) == sizeof(pair);
    }
    if (good && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Waits until the first `number` blocks of the list are copied, or until `stop` returns true. */
static CUresult copied(int list, unsigned number, bool (*stop)(void))
{
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    for (;;) {
        struct vgpu_parked_list head;
        if (pread(list, &head, sizeof(head), 0) != sizeof(head))
            return CUDA_ERROR_OPERATING_SYSTEM;
        if (head.result != VGPU_PARKED_ASKED)
            return (CUresult)head.result;
        if (head.copied >= number)
            return CUDA_SUCCESS;
        if (stop != NULL && stop())
            return CUDA_ERROR_NOT_READY;
        nanosleep(&pause, NULL);
    }
}

/* Brings the chunks of a block back. `block` is the block itself, or has its contents on this device. */
static CUresult land(struct block *block, unsigned number, CUstream stream)
{
    CUdeviceptr base;
    CUresult result = CUDA_SUCCESS;
    if (block->handle == 0) {
        result = CALL(cuMemImportFromShareableHandle, &block->handle, (void *)(intptr_t)block->fd,
                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS) {
            memset(&home, 0, sizeof(home));
            return result;
        }
    }
    result = map_block(block, &base);
    if (result != CUDA_SUCCESS)
        return result;
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count && result == CUDA_SUCCESS; i++) {
            struct vgpu_chunk *chunk = &allocation->chunks[i];
            if (!chunk->parked || chunk->block != number)
                continue;
            if (chunk->handle == 0)
                result = vgpu_chunk_map(allocation, i);
            if (result == CUDA_SUCCESS)
                result = CALL(cuMemcpyDtoDAsync_v2, vgpu_chunk_base(allocation, i), base + chunk->at,
                              vgpu_chunk_bytes(allocation, i), stream);
        }
    CUresult done = CALL(cuStreamSynchronize, stream);
    unmap_block(block, base);
    return result == CUDA_SUCCESS ? done : result;
}

/* Records that the chunks of a block are back on the device. */
static void settle(unsigned number)
{
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++)
            if (allocation->chunks[i].block == number)
                allocation->chunks[i].parked = false;
}

/*
 * Asks vgpud to fill the blocks of `made`. Brings the chunks of each one back as soon as it is filled, and ends it,
 * which leaves room for the next. `left` counts the blocks of `made` that exist.
 */
static CUresult fetch(struct block *made, unsigned *left, CUstream stream, bool (*stop)(void))
{
    int list = write_list(made);
    if (list < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    __atomic_store_n(asks, VGPU_SWAP_COMING | (uint32_t)list << VGPU_SWAP_KEPT_SHIFT, __ATOMIC_SEQ_CST);
    CUresult result = CUDA_SUCCESS;
    while (*left > 0 && result == CUDA_SUCCESS) {
        result = copied(list, count - *left + 1, stop);
        if (*left == 1)
            __atomic_store_n(asks, VGPU_SWAP_COMING, __ATOMIC_SEQ_CST); /* all are copied */
        if (result == CUDA_SUCCESS)
            result = land(&made[*left - 1], *left - 1, stream);
        if (result == CUDA_SUCCESS)
            end_block(&made[--*left]);
    }
    __atomic_store_n(asks, VGPU_SWAP_COMING, __ATOMIC_SEQ_CST);
    close(list);
    return result;
}

/*
 * Makes blocks on this device, and brings the chunks back by way of them. The blocks on the old device stay until all
 * chunks are back: after an error the chunks are parked there as before.
 */
static CUresult cross(CUstream stream, bool (*stop)(void))
{
    struct block *made = calloc(count, sizeof(*made));
    unsigned left = 0;
    CUresult result = made == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    while (result == CUDA_SUCCESS && left < count) {
        result = make_block(&made[left], blocks[left].bytes);
        left += result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = fetch(made, &left, stream, stop);
    while (left > 0)
        end_block(&made[--left]);
    free(made);
    if (result != CUDA_SUCCESS) {
        vgpu_parked_away();
        return result;
    }
    behind = count;
    while (count > 0)
        settle(--count);
    return CUDA_SUCCESS;
}

CUresult vgpu_parked_in(CUstream stream, bool (*stop)(void))
{
    CUuuid now = count > 0 ? here() : home;
    if (memcmp(&now, &home, sizeof(home)) != 0)
        return cross(stream, stop);
    while (count > 0) {
        CUresult result = land(&blocks[count - 1], count - 1, stream);
        if (result != CUDA_SUCCESS)
            return result;
        settle(--count);
        end_block(&blocks[count]);
    }
    return CUDA_SUCCESS;
}

unsigned vgpu_parked_behind(void)
{
    return behind;
}

void vgpu_parked_end(void)
{
    while (behind > 0)
        end_block(&blocks[--behind]);
}

void vgpu_parked_away(void)
{
    for (unsigned i = 0; i < count; i++)
        let_handle_go(&blocks[i]);
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++)
            if (allocation->chunks[i].parked && allocation->chunks[i].handle != 0)
                vgpu_chunk_unmap(allocation, i);
}

void vgpu_parked_start(uint32_t *phase)
{
    asks = phase;
}

/* Closes the blocks in a forked child: its copies of the descriptors would keep the memory allocated. */
static void reset(void)
{
    for (count += behind; count > 0; count--)
        close(blocks[count - 1].fd);
    behind = 0;
    memset(&home, 0, sizeof(home));
}
VGPU_IN_CHILD(reset);

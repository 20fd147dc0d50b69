/*
 * parked.c: the descriptors of parked memory (residency/parked.h), with functions in place of the driver's. No program
 * that the process starts and no child of it has them, since they keep memory allocated. Exit status 0: all passed.
 */
#include "parked.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "allocation.h"
#include "functions.h"
#include "in_child.h"
#include "lease.h"

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

#define DESCRIPTORS 64
#define CHUNK_BYTES (1ull << 30)
#define CHUNKS 3u /* the chunks are parked in two blocks: one for two chunks, and one for the last chunk */
#define BLOCKS 2u
#define LAST (CHUNKS - 1)

void *vgpu_reals[VGPU_FUNCTIONS];
static struct vgpu_allocation *allocation;
static char device = 1; /* the first byte of the UUID of the current device */
static uint32_t phase;
static unsigned lists;

struct vgpu_allocation *vgpu_allocations(void)
{
    return allocation;
}

CUresult vgpu_chunk_map(struct vgpu_allocation *of, unsigned chunk)
{
    of->chunks[chunk].handle = 1;
    return CUDA_SUCCESS;
}

CUresult vgpu_chunk_unmap(struct vgpu_allocation *of, unsigned chunk)
{
    of->chunks[chunk].handle = 0;
    return CUDA_SUCCESS;
}

static CUresult succeed(void)
{
    return CUDA_SUCCESS;
}

static CUresult get_uuid(CUuuid *uuid, CUdevice unused)
{
    (void)unused;
    memset(uuid, device, sizeof(*uuid));
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags)
{
    (void)bytes, (void)prop, (void)flags;
    *handle = 7;
    return CUDA_SUCCESS;
}

/* As the driver's, the descriptor has the lowest free number and is inherited by programs. */
static CUresult export_block(void *fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                             unsigned long long flags)
{
    (void)handle, (void)type, (void)flags;
    *(int *)fd = memfd_create("block", 0);
    return CUDA_SUCCESS;
}

void *vgpu_real_found(enum vgpu_function_id id)
{
    return id == VGPU_FN_cuDeviceGetUuid_v2             ? (void *)get_uuid
           : id == VGPU_FN_cuMemCreate                  ? (void *)create
           : id == VGPU_FN_cuMemExportToShareableHandle ? (void *)export_block
                                                        : (void *)succeed;
}

static bool is_memory(int fd)
{
    char link[32];
    char path[64] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof(path) - 1) > 0 && strncmp(path, "/memfd:", 7) == 0;
}

/* Returns the number of descriptors of parked memory. Asserts that each is above the standard ones and is not inherited
 * by programs. */
static unsigned kept(void)
{
    unsigned count = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++)
        if (is_memory(fd)) {
            CHECK(fd > STDERR_FILENO && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
            count++;
        }
    return count;
}

/* Returns the descriptor of the list that waits for a copy. */
static int list(void)
{
    int fd = (int)(phase >> VGPU_SWAP_KEPT_SHIFT);
    CHECK((phase & ((1u << VGPU_SWAP_KEPT_SHIFT) - 1)) == VGPU_SWAP_COMING && is_memory(fd));
    return fd;
}

static bool is_back(unsigned chunk)
{
    return allocation->chunks[chunk].handle != 0;
}

/* Runs while the process waits for the copy. It then has descriptors of two old and two new blocks, and of the list. */
static bool look_at_list(void)
{
    struct vgpu_parked_block pairs[BLOCKS];
    CHECK(pread(list(), pairs, sizeof(pairs), sizeof(struct vgpu_parked_list)) == sizeof(pairs));
    CHECK(pairs[0].bytes == CHUNK_BYTES && pairs[1].bytes == 2 * CHUNK_BYTES && kept() == 2 * BLOCKS + 1);
    lists++;
    return true;
}

static void write_word(size_t at, uint32_t word)
{
    CHECK(pwrite(list(), &word, sizeof(word), (off_t)at) == sizeof(word));
}

/* Copies the first block of the list. Then the copy fails, or (for `whole`) goes on. */
static bool copy_one(bool whole)
{
    if (!is_back(LAST)) {
        CHECK(!is_back(0) && kept() == 2 * BLOCKS + 1);
        write_word(offsetof(struct vgpu_parked_list, copied), 1);
        return false;
    }
    CHECK(!is_back(0) && kept() == 2 * BLOCKS); /* the new block that came back has no descriptor any more */
    write_word(whole ? offsetof(struct vgpu_parked_list, copied) : offsetof(struct vgpu_parked_list, result),
               whole ? BLOCKS : CUDA_ERROR_ILLEGAL_ADDRESS);
    return false;
}

static bool copy_one_and_fail(void)
{
    return copy_one(false);
}

static bool copy_one_and_all(void)
{
    return copy_one(true);
}

static bool is_parked(void)
{
    for (unsigned i = 0; i < CHUNKS; i++)
        if (is_back(i) || !allocation->chunks[i].parked)
            return false;
    return kept() == BLOCKS;
}

static void test_a_child_has_none(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        vgpu_in_child();
        CHECK(kept() == 0 && vgpu_parked_in(NULL, NULL) == CUDA_SUCCESS);
        exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(kept() == BLOCKS);
}

int main(void)
{
    int out = fcntl(STDOUT_FILENO, F_DUPFD, DESCRIPTORS);
    close(STDIN_FILENO);
    close(STDOUT_FILENO);
    allocation = calloc(1, sizeof(*allocation) + CHUNKS * sizeof(struct vgpu_chunk));
    CHECK(allocation != NULL);
    allocation->chunk_bytes = CHUNK_BYTES;
    allocation->bytes = CHUNKS * CHUNK_BYTES;
    allocation->chunk_count = CHUNKS;
    for (unsigned i = 0; i < CHUNKS; i++)
        allocation->chunks[i].handle = 1;
    vgpu_parked_start(&phase);
    vgpu_parked_out(NULL);
    CHECK(is_parked());
    test_a_child_has_none();
    device = 2;
    CHECK(vgpu_parked_in(NULL, look_at_list) == CUDA_ERROR_NOT_READY && lists == 1 && is_parked());
    CHECK(vgpu_parked_in(NULL, copy_one_and_fail) == CUDA_ERROR_ILLEGAL_ADDRESS && is_parked());
    device = 1; /* the move is undone */
    CHECK(vgpu_parked_in(NULL, NULL) == CUDA_SUCCESS && is_back(0) && is_back(LAST) && kept() == 0);
    vgpu_parked_out(NULL);
    device = 2;
    CHECK(vgpu_parked_in(NULL, copy_one_and_all) == CUDA_SUCCESS && is_back(0) && is_back(LAST));
    CHECK(kept() == BLOCKS); /* the blocks on the old device stay until vgpu_parked_end() */
    vgpu_parked_end();
    CHECK(kept() == 0);
    CHECK(!allocation->chunks[0].parked && !allocation->chunks[LAST].parked);
    free(allocation);
    return dprintf(out, "ok\n") != 3;
}

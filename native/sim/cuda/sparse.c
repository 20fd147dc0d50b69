/*
 * Copies and fills of device memory that keep its file sparse. A page that was never written is neither read nor
 * written if zeros are copied to it, because the kernel clears each page that is touched: for most programs of the
 * tests this would take more time than everything else they do.
 */
#include <errno.h>
#include <unistd.h>

#include "internal.h"

#define LEAST_BYTES (64u << 10) /* for less than this the system calls cost more than they save */
#define PIECE_BYTES (2u << 20)  /* most bytes that are copied while cu_lock is held */
#define ZERO_BYTES 4096u        /* the pieces of a source that are compared with zeros */

/* Bytes that are all in a hole of one file, or all outside of holes. */
struct part {
    int file; /* -1: not known */
    uint64_t offset;
    size_t bytes;
    bool hole;
};

static void end_at(struct part *part, off_t end)
{
    if (end > (off_t)part->offset && (uint64_t)end - part->offset < part->bytes)
        part->bytes = (uint64_t)end - part->offset;
}

/*
 * Returns the hole that begins at p; if none begins there, the memory from p on that is in the same file. The caller
 * holds cu_lock.
 */
static struct part hole_at(const void *p, size_t size)
{
    struct part part = {.file = -1, .bytes = size};
    CUdeviceptr at = (CUdeviceptr)p;
    if (!cu_in_arena(at))
        return part;
    const struct cu_block *b = cu_block_at(at);
    if (b == NULL)
        part.file = cu_vmm_file(at, &part.offset, &part.bytes);
    else if (!b->imported)
        part.file = cu_arena_file(at, &part.offset);
    if (part.file < 0)
        return part;
    off_t data = lseek(part.file, (off_t)part.offset, SEEK_DATA);
    part.hole = data > (off_t)part.offset || (data < 0 && errno == ENXIO);
    if (part.hole)
        end_at(&part, data);
    return part;
}

/* Returns the first part of the memory at p: a hole, or the bytes up to the next hole. The caller holds cu_lock. */
static struct part part_at(const void *p, size_t size)
{
    struct part part = hole_at(p, size);
    if (part.file >= 0 && !part.hole)
        end_at(&part, lseek(part.file, (off_t)part.offset, SEEK_HOLE));
    return part;
}

static bool is_zero(const char *p, size_t size)
{
    return p[0] == 0 && memcmp(p, p + 1, size - 1) == 0;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Writes to a hole by a system call, which takes half the time of a write to a page that is not there. */
static void write_hole(const struct part *hole, size_t at, char *to, const char *from, size_t size)
{
    if (pwrite(hole->file, from, size, (off_t)(hole->offset + at)) != (ssize_t)size)
        memcpy(to, from, size);
}

static void copy_to_hole(const struct part *hole, char *to, const char *from, size_t size)
{
    size_t first = 0; /* offset of the first byte that must still be written */
    for (size_t at = 0; at < size; at += ZERO_BYTES) {
        size_t bytes = least(size - at, ZERO_BYTES);
        if (!is_zero(from + at, bytes))
            continue;
        if (first < at)
            write_hole(hole, first, to + first, from + first, at - first);
        first = at + bytes;
    }
    if (first < size)
        write_hole(hole, first, to + first, from + first, size - first);
}

void cu_sparse_copy(char *to, const char *from, size_t size)
{
    bool apart = to + size <= from || from + size <= to;
    if (size < LEAST_BYTES || !apart) {
        memmove(to, from, size);
        return;
    }
    while (size > 0) {
        cu_lock();
        struct part target = part_at(to, least(size, PIECE_BYTES)), source = part_at(from, target.bytes);
        if (!source.hole && !target.hole)
            memcpy(to, from, source.bytes);
        else if (!source.hole)
            copy_to_hole(&target, to, from, source.bytes);
        else if (!target.hole)
            memset(to, 0, source.bytes);
        cu_unlock();
        to += source.bytes;
        from += source.bytes;
        size -= source.bytes;
    }
}

static void repeat(const struct part *part, char *to, const char *pattern, size_t length)
{
    for (size_t at = 0; at < part->bytes; at += length) {
        size_t bytes = least(length, part->bytes - at);
        if (part->hole)
            write_hole(part, at, to + at, pattern, bytes);
        else
            memcpy(to + at, pattern, bytes);
    }
}

void cu_sparse_fill(char *to, size_t size, const char *pattern, size_t length)
{
    bool zero = is_zero(pattern, length);
    while (size > 0) {
        struct part part = {.file = -1, .bytes = size};
        bool large = size >= LEAST_BYTES;
        if (large) {
            cu_lock();
            part = part_at(to, least(size, PIECE_BYTES));
        }
        if (!zero || !part.hole)
            repeat(&part, to, pattern, length);
        if (large)
            cu_unlock();
        to += part.bytes;
        size -= part.bytes;
    }
}

size_t cu_sparse_zeros(const void *p, size_t size)
{
    cu_lock();
    struct part part = hole_at(p, size);
    cu_unlock();
    return part.hole ? part.bytes : 0;
}

/*
 * aside.h: work whose time a tenant decides. Locks of a file are a list that a tenant makes as long as it likes, and
 * fcntl(2) and close(2) go through all of it. What /proc says of a process may wait for the end of its exec, and a file
 * system of the tenant's own (FUSE) can make that last. Such work is done on a thread of its own. It is awaited until it
 * has used ASIDE_MAX_NS of a processor, or sleeps; a thread that waits for a processor is waited for. After that the
 * thread goes on alone, and ends when its work does.
 */
#ifndef ARBITER_ASIDE_H
#define ARBITER_ASIDE_H

#include <stddef.h>
#include <stdint.h>

#define ASIDE_MAX_NS 500000u /* some 2000 locks on one file; libvgpu sets one a process */
#define ASIDE_DATA_BYTES 128

enum aside {
    ASIDE_DONE,
    ASIDE_GOES_ON,   /* without an answer */
    ASIDE_NOT_BEGUN, /* no thread: too many go on alone */
};

/* Runs `work` on a copy of `data`, which is copied back when it is done. The work owns every descriptor that is in it.
 * *took_ns: processor time, above ASIDE_MAX_NS if it is not done. */
enum aside aside(void (*work)(void *data), void *data, size_t size, uint64_t *took_ns);

#endif

/*
 * aside.h: runs work whose duration a tenant controls on another thread. A tenant can set any number of locks on a
 * file, and fcntl(2) and close(2) walk the list of all of them. A read of /proc/PID may wait for the end of the
 * process's exec, which a file system of the tenant (FUSE) can delay. The caller waits until the work is done, the
 * thread has used ASIDE_MAX_NS of processor time, or the thread sleeps; time in which the thread waits for a processor
 * does not count. The thread begins on the caller's processor, so that the caller seldom waits for another process. A
 * thread that does not end is abandoned, and ends when its work ends. At most ASIDE_ALONE_MAX threads may be abandoned
 * for one tenant.
 */
#ifndef ARBITER_ASIDE_H
#define ARBITER_ASIDE_H

#include <stddef.h>
#include <stdint.h>

/* 500 us: enough for a walk over some 2000 locks on one file; libvgpu sets one lock for each process */
#define ASIDE_MAX_NS 500000u
#define ASIDE_DATA_BYTES 128
#define ASIDE_ALONE_MAX 4

enum aside {
    ASIDE_DONE,
    ASIDE_GOES_ON,   /* the work was abandoned without an answer */
    ASIDE_NOT_BEGUN, /* the work was not started: too many abandoned threads, no memory or no thread */
};

/*
 * Runs `work` on a copy of `data`, which is copied back when the work is done. The work owns every descriptor in
 * `data`, unless it was not begun. *took_ns is the processor time of the work, or ASIDE_MAX_NS + 1 if the work is not
 * done. `tenant` is any number that tells tenants apart.
 */
enum aside aside(uint64_t tenant, void (*work)(void *data), void *data, size_t size, uint64_t *took_ns);

#endif

/*
 * aside.h: runs work whose duration a tenant controls. A tenant can set any number of locks on a file, and fcntl(2) and
 * close(2) walk the list of all of them. A read of /proc/PID may wait for the end of the process's exec, which a file
 * system of the tenant's own (FUSE) can delay. Such work is done on a thread of its own. The caller waits until the
 * thread has used ASIDE_MAX_NS of a processor, or sleeps; time in which the thread waits for a processor does not
 * count. Then the thread is abandoned, and ends when its work ends.
 */
#ifndef ARBITER_ASIDE_H
#define ARBITER_ASIDE_H

#include <stddef.h>
#include <stdint.h>

#define ASIDE_MAX_NS 500000u /* enough for some 2000 locks on one file; libvgpu sets one lock for each process */
#define ASIDE_DATA_BYTES 128

enum aside {
    ASIDE_DONE,
    ASIDE_GOES_ON,   /* abandoned, without an answer */
    ASIDE_NOT_BEGUN, /* no thread: too many are abandoned */
};

/*
 * Runs `work` on a copy of `data`, which is copied back when it is done. The work owns every descriptor in `data`.
 * *took_ns: processor time; above ASIDE_MAX_NS if the work is not done.
 */
enum aside aside(void (*work)(void *data), void *data, size_t size, uint64_t *took_ns);

#endif

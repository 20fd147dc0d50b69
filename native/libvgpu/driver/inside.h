/*
 * inside.h: which threads are in the driver now, and how many calls they have made: of a process that is cut
 * (cut.h). Each thread writes a record of its own, without a locked instruction; the reader of the
 * records makes the threads' writes visible first, by membarrier(2).
 */
#ifndef VGPU_INSIDE_H
#define VGPU_INSIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "invariant.h"

struct vgpu_inside {
    uint64_t calls;    /* begun */
    uint64_t launches; /* of them */
    uint32_t depth;    /* of calls that have not returned */
    uint32_t owned;    /* 0: its thread has ended, and another may have it */
    struct vgpu_inside *next;
};

extern __thread struct vgpu_inside *vgpu_inside_own __attribute__((tls_model("initial-exec")));

/* This thread's record; made at its first call. Never NULL: without memory, one that says that a thread is inside. */
struct vgpu_inside *vgpu_inside_first(void);

static inline struct vgpu_inside *vgpu_inside_enter(void)
{
    struct vgpu_inside *own = vgpu_inside_own;
    if (__builtin_expect(own == 0, 0))
        own = vgpu_inside_first();
    __atomic_store_n(&own->calls, own->calls + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&own->depth, own->depth + 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* before the look at the flag: see vgpu_inside_read */
    return own;
}

/* For a variable's cleanup. NULL: nothing was entered. */
static inline void vgpu_inside_leave(struct vgpu_inside **own)
{
    if (*own == 0)
        return;
    VGPU_ASSERT((*own)->depth > 0);
    __atomic_store_n(&(*own)->depth, (*own)->depth - 1, __ATOMIC_RELEASE);
}

/* Launches that were entered so far. */
uint64_t vgpu_inside_launches(void);

/* Reads what all threads did before this call: a thread that has not entered by then sees what was written
 * before it. Returns the calls so far; *inside: is any thread in one? */
uint64_t vgpu_inside_read(bool *inside);

/* As vgpu_inside_read, without membarrier(2): the result may miss the newest call of a thread, and no thread is
 * interrupted. */
uint64_t vgpu_inside_glance(bool *inside);

#endif

/*
 * inside.h: counts which threads are inside the driver now, and how many calls they made, for a process under the
 * engine cut (cut.h). Each thread writes its own record without a locked instruction. The reader first makes the
 * threads' writes visible by membarrier(2).
 */
#ifndef VGPU_INSIDE_H
#define VGPU_INSIDE_H

#include <stdbool.h>
#include <stdint.h>

#include "invariant.h"

struct vgpu_inside {
    uint64_t calls;    /* number of calls begun */
    uint64_t launches; /* number of these calls that are launches */
    uint32_t depth;    /* number of nested calls that have not returned */
    uint32_t owned;    /* 0: the record's thread has ended, and another thread may take the record */
    struct vgpu_inside *next;
};

extern __thread struct vgpu_inside *vgpu_inside_own __attribute__((tls_model("initial-exec")));

/*
 * Returns this thread's record, made at its first call. Does not return NULL: if no record can be made, it returns a
 * shared record that always counts as inside.
 */
struct vgpu_inside *vgpu_inside_first(void);

static inline struct vgpu_inside *vgpu_inside_enter(void)
{
    struct vgpu_inside *own = vgpu_inside_own;
    if (__builtin_expect(own == 0, 0))
        own = vgpu_inside_first();
    __atomic_store_n(&own->calls, own->calls + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&own->depth, own->depth + 1, __ATOMIC_RELAXED);
    /* the count is written before the caller checks vgpu_suspended.bits: see vgpu_inside_read */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return own;
}

/* Leaves a call. The compiler calls it at the end of the block (attribute cleanup). *own NULL: no call was entered. */
static inline void vgpu_inside_leave(struct vgpu_inside **own)
{
    if (*own == 0)
        return;
    VGPU_ASSERT((*own)->depth > 0);
    __atomic_store_n(&(*own)->depth, (*own)->depth - 1, __ATOMIC_RELEASE);
}

/* Returns the number of launches that this process began under the engine cut. */
uint64_t vgpu_inside_launches(void);

/*
 * Reads all records. If the kernel has membarrier(2), a thread that is not counted as inside here sees, in its next
 * call, every write that the caller made before. Returns the number of calls. Sets *inside to whether a thread is
 * inside a call.
 */
uint64_t vgpu_inside_read(bool *inside);

/*
 * As vgpu_inside_read, without membarrier(2): no thread is interrupted, but the result may miss the newest call of a
 * thread.
 */
uint64_t vgpu_inside_glance(bool *inside);

#endif

/*
 * suspended.h: a lease that is suspended (VGPU_LEASE_SUSPENDED): its device memory is on the host, and a call
 * of the driver blocks inside it, unseen by vgpud. So calls that bring work or take memory wait here, in front of the
 * driver, and say in the slot that they do: vgpud then resumes the lease.
 *
 * Any thread may call these functions but those "for the link thread". Waiting has no time limit: it ends with the
 * resume, or with the process.
 */
#ifndef VGPU_SUSPENDED_H
#define VGPU_SUSPENDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "in_child.h"
#include "inside.h"
#include "lease.h"

struct vgpu_suspended_words {
    _Alignas(64) uint64_t calls; /* that were counted here so far */
    _Alignas(64) uint32_t bits;  /* enum vgpu_suspended_bits; not 0: look closer before the driver is called */
    uint32_t held;               /* 1: the memory is on its way or on the host, whatever the lease says */
};
enum vgpu_suspended_bits {
    VGPU_SUSPENDED_LEASE = 1,
    VGPU_SUSPENDED_IDLE = 2, /* the arbiter is to hear of the next call: cut.h */
    VGPU_SUSPENDED_CUT = 4,  /* calls are counted by thread: inside.h */
};
extern struct vgpu_suspended_words vgpu_suspended;

/* Says that work comes if the process counts as idle, and waits until the lease is back, if it is suspended. */
void vgpu_suspended_wait(void);

static inline void vgpu_suspended_check(void)
{
    if (__builtin_expect(
            __atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED) & (VGPU_SUSPENDED_LEASE | VGPU_SUSPENDED_IDLE), 0))
        vgpu_suspended_wait();
}

/* As vgpu_suspended_check, and enters: for a process that is cut. */
struct vgpu_inside *vgpu_suspended_enter(void);

static inline struct vgpu_inside *vgpu_suspended_called(void)
{
    uint64_t calls = __atomic_load_n(&vgpu_suspended.calls, __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_suspended.calls, calls + 1, __ATOMIC_RELAXED);
    return __builtin_expect(__atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED) != 0, 0) ? vgpu_suspended_enter()
                                                                                             : NULL;
}

/* In front of a driver call that is no launch, which lasts until the end of the block. Of two threads' counts at once
 * one may be lost: only whether the figure moves is asked, and an add that is atomic costs 5 ns more. */
#define vgpu_suspended_call() \
    struct vgpu_inside *inside_call_ __attribute__((cleanup(vgpu_inside_leave), unused)) = vgpu_suspended_called()

/* A launch, likewise: it looks at the gate itself. */
static inline struct vgpu_inside *vgpu_suspended_launched(void)
{
    uint32_t bits = __atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED);
    if ((bits & VGPU_SUSPENDED_CUT) == 0)
        return NULL;
    struct vgpu_inside *own = vgpu_inside_enter();
    __atomic_store_n(&own->launches, own->launches + 1, __ATOMIC_RELAXED);
    return own;
}
#define vgpu_suspended_launch() \
    struct vgpu_inside *inside_launch_ __attribute__((cleanup(vgpu_inside_leave), unused)) = vgpu_suspended_launched()

/* Is it suspended now, or its memory not back yet? False before vgpu_suspended_start. */
bool vgpu_suspended_now(void);

/* What the page says now (enum vgpu_lease_state); 0 before vgpu_suspended_start. */
uint32_t vgpu_suspended_state(void);

/* Called when work comes while VGPU_SUSPENDED_IDLE is set. */
void vgpu_suspended_on_work(void (*say)(void));

/* Sets or clears one of the bits. */
void vgpu_suspended_set(uint32_t bit, bool to);

/* Follows the page: notes that the lease was suspended, or wakes the threads that wait for its resume. */
void vgpu_suspended_follow(void);

/* Sets whether the memory is held; vgpu_suspended_follow is due after it. */
static inline void vgpu_suspended_hold(bool held)
{
    __atomic_store_n(&vgpu_suspended.held, held, __ATOMIC_SEQ_CST);
}

static inline bool vgpu_suspended_held(void)
{
    return __atomic_load_n(&vgpu_suspended.held, __ATOMIC_SEQ_CST) != 0;
}

/* What moves the memory. Called by the link's thread. */
struct vgpu_suspended_listener {
    /* From vgpu_suspended_start. Both pages stay mapped until the process ends, or forks. */
    void (*start)(const struct vgpu_limits *limits, struct vgpu_slot *slot);
    /* The lease's state may have changed. `quiet`: it is suspended, and what was launched has run. */
    void (*follow)(bool quiet);
};

/* Makes a `static const struct vgpu_suspended_listener` known. */
#define VGPU_SUSPENDED_LISTENER(name) \
    VGPU_RETAINED                     \
    __attribute__((                   \
        section("vgpu_suspended_listeners"))) static const struct vgpu_suspended_listener *const name##_listed = &name

/* --- for the link thread */

void vgpu_suspended_start(const struct vgpu_limits *limits, struct vgpu_slot *slot);

/* Writes the figures of the slot. `launches`: by weight. */
void vgpu_suspended_answer(uint64_t launches, bool busy, bool quiet);

#endif

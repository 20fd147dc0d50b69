/*
 * suspended.h: handles a suspended lease (VGPU_LEASE_SUSPENDED). Its device memory may be on the host, and a driver
 * call would then block inside the driver, where vgpud does not see it. So most driver calls (hooks.toml) wait here,
 * before the driver, and report that in the slot; vgpud then resumes the lease.
 *
 * Any thread may call these functions except those "only for the link's thread". The wait has no time limit: it ends
 * with the resume, or with the process.
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
    _Alignas(64) uint64_t calls; /* number of driver calls other than launches so far */
    /* bits of enum vgpu_suspended_bits; if not 0, a call needs more checks before it reaches the driver */
    _Alignas(64) uint32_t bits;
    uint32_t held; /* 1: the memory is being moved or is on the host, whatever the lease's state is */
};
enum vgpu_suspended_bits {
    VGPU_SUSPENDED_LEASE = 1,
    VGPU_SUSPENDED_IDLE = 2, /* the next call must be reported to the arbiter (cut.h) */
    VGPU_SUSPENDED_CUT = 4,  /* calls are counted separately for each thread (inside.h) */
};
extern struct vgpu_suspended_words vgpu_suspended;

/* Reports work if the process counts as idle. If the lease is suspended, waits until it is resumed. */
void vgpu_suspended_wait(void);

static inline void vgpu_suspended_check(void)
{
    if (__builtin_expect(
            __atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED) & (VGPU_SUSPENDED_LEASE | VGPU_SUSPENDED_IDLE), 0))
        vgpu_suspended_wait();
}

/* As vgpu_suspended_check, and counts the thread as inside the driver, for a process under the engine cut. */
struct vgpu_inside *vgpu_suspended_enter(void);

static inline struct vgpu_inside *vgpu_suspended_called(void)
{
    uint64_t calls = __atomic_load_n(&vgpu_suspended.calls, __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_suspended.calls, calls + 1, __ATOMIC_RELAXED);
    return __builtin_expect(__atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED) != 0, 0) ? vgpu_suspended_enter()
                                                                                             : NULL;
}

/*
 * Placed before a driver call other than a launch: the thread counts as inside the driver until the end of the block.
 * If two threads count a call at the same time, one count may be lost: only a change of the number matters, and an
 * atomic addition costs 5 ns more.
 */
#define vgpu_suspended_call() \
    struct vgpu_inside *inside_call_ __attribute__((cleanup(vgpu_inside_leave), unused)) = vgpu_suspended_called()

/* As vgpu_suspended_called, for a launch, which checks the gate itself. */
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

/* Is the lease suspended now, or its memory not back on the device yet? False before vgpu_suspended_start. */
bool vgpu_suspended_now(void);

/* Returns the present state in the limits page (enum vgpu_lease_state); 0 before vgpu_suspended_start. */
uint32_t vgpu_suspended_state(void);

/*
 * Sets the function that reports work to the arbiter. A driver call runs it if VGPU_SUSPENDED_IDLE is set, or after the
 * call waited for the lease.
 */
void vgpu_suspended_on_work(void (*say)(void));

/* Sets or clears one of enum vgpu_suspended_bits. */
void vgpu_suspended_set(uint32_t bit, bool to);

/* Reads the limits page. Records a suspension, or wakes the threads that wait for the resume. */
void vgpu_suspended_follow(void);

/* Sets whether the memory is being moved or on the host. The caller calls vgpu_suspended_follow afterwards. */
static inline void vgpu_suspended_hold(bool held)
{
    __atomic_store_n(&vgpu_suspended.held, held, __ATOMIC_SEQ_CST);
}

static inline bool vgpu_suspended_held(void)
{
    return __atomic_load_n(&vgpu_suspended.held, __ATOMIC_SEQ_CST) != 0;
}

/*
 * The module that moves the memory. Its functions are called by the link's thread, or by vgpu_link_start before that
 * thread exists.
 */
struct vgpu_suspended_listener {
    /* Called by vgpu_suspended_start. Both pages stay mapped until the process ends or forks. */
    void (*start)(const struct vgpu_limits *limits, struct vgpu_slot *slot);
    /*
     * Called when the lease's state may have changed. `quiet`: the lease is suspended, and all launches have finished.
     */
    void (*follow)(bool quiet);
};

/* Registers a `static const struct vgpu_suspended_listener`. */
#define VGPU_SUSPENDED_LISTENER(name) \
    VGPU_RETAINED                     \
    __attribute__((                   \
        section("vgpu_suspended_listeners"))) static const struct vgpu_suspended_listener *const name##_listed = &name

/* --- only for the link's thread, or before it exists */

void vgpu_suspended_start(const struct vgpu_limits *limits, struct vgpu_slot *slot);

/*
 * Writes the activity words of the slot (calls, looks, busy, quiet). `launches` is the weighted number of launches
 * (launch.c).
 */
void vgpu_suspended_answer(uint64_t launches, bool busy, bool quiet);

#endif

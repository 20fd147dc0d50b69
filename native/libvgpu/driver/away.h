/*
 * away.h: a lease that is away (VGPU_LEASE_AWAY): its device memory is on the host, and whoever calls the
 * driver blocks in there, where nobody sees it. So calls that bring work or take memory wait here, in front
 * of the driver, and say in the slot that they do: vgpud then brings the lease back.
 */
#ifndef VGPU_AWAY_H
#define VGPU_AWAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "in_child.h"
#include "inside.h"
#include "lease.h"

struct vgpu_away_words {
    _Alignas(64) uint64_t calls; /* that were counted here so far */
    _Alignas(64) uint32_t away;  /* enum vgpu_away_bits; not 0: look closer before the driver is called */
    uint32_t held;               /* 1: the memory is on its way or on the host, whatever the lease says */
};
enum vgpu_away_bits {
    VGPU_AWAY_LEASE = 1,
    VGPU_AWAY_IDLE = 2, /* the arbiter is to hear of the next call: cut.h */
    VGPU_AWAY_CUT = 4,  /* calls are counted by thread: inside.h */
};
extern struct vgpu_away_words vgpu_away;

/* Says that work comes if the process counts as idle, and waits until the lease is back, if it is away. */
void vgpu_away_wait(void);

static inline void vgpu_away_check(void)
{
    if (__builtin_expect(__atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED) & (VGPU_AWAY_LEASE | VGPU_AWAY_IDLE), 0))
        vgpu_away_wait();
}

/* As vgpu_away_check, and enters: for a process that is cut. */
struct vgpu_inside *vgpu_away_enter(void);

static inline struct vgpu_inside *vgpu_away_called(void)
{
    uint64_t calls = __atomic_load_n(&vgpu_away.calls, __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_away.calls, calls + 1, __ATOMIC_RELAXED);
    return __builtin_expect(__atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED) != 0, 0) ? vgpu_away_enter() : NULL;
}

/* In front of a driver call that is no launch, which lasts until the end of the block. Of two threads' counts at once
 * one may be lost: only whether the figure moves is asked, and an add that is atomic costs 5 ns more. */
#define vgpu_away_call() \
    struct vgpu_inside *inside_call_ __attribute__((cleanup(vgpu_inside_leave), unused)) = vgpu_away_called()

/* A launch, likewise: it looks at the gate itself. */
static inline struct vgpu_inside *vgpu_away_launched(void)
{
    uint32_t bits = __atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED);
    if ((bits & VGPU_AWAY_CUT) == 0)
        return NULL;
    struct vgpu_inside *own = vgpu_inside_enter();
    __atomic_store_n(&own->launches, own->launches + 1, __ATOMIC_RELAXED);
    return own;
}
#define vgpu_away_launch() \
    struct vgpu_inside *inside_launch_ __attribute__((cleanup(vgpu_inside_leave), unused)) = vgpu_away_launched()

/* Is it away now, or its memory not back yet? False before vgpu_away_start. */
bool vgpu_away_now(void);

/* What the page says now (enum vgpu_lease_state); 0 before vgpu_away_start. */
uint32_t vgpu_away_state(void);

/* Called when work comes while VGPU_AWAY_IDLE is set. */
void vgpu_away_on_work(void (*say)(void));

/* Sets or clears one of the bits. */
void vgpu_away_set(uint32_t bit, bool to);

/* Follows the page: takes note that the lease went, or wakes those who wait for it. */
void vgpu_away_follow(void);

/* Sets whether the memory is held; vgpu_away_follow is due after it. */
static inline void vgpu_away_hold(bool held)
{
    __atomic_store_n(&vgpu_away.held, held, __ATOMIC_SEQ_CST);
}

static inline bool vgpu_away_held(void)
{
    return __atomic_load_n(&vgpu_away.held, __ATOMIC_SEQ_CST) != 0;
}

/* What moves the memory. Called by the link's thread. */
struct vgpu_away_listener {
    /* From vgpu_away_start. Both pages stay mapped until the process ends, or forks. */
    void (*start)(const struct vgpu_limits *limits, struct vgpu_slot *slot);
    /* The lease's state may have changed. `quiet`: it is away, and what was launched has run. */
    void (*follow)(bool quiet);
};

/* Makes a `static const struct vgpu_away_listener` known. */
#define VGPU_AWAY_LISTENER(name) \
    VGPU_RETAINED                \
    __attribute__((section("vgpu_away_listeners"))) static const struct vgpu_away_listener *const name##_listed = &name

/* --- for the link thread */

void vgpu_away_start(const struct vgpu_limits *limits, struct vgpu_slot *slot);

/* Writes the figures of the slot. `launches`: by weight. */
void vgpu_away_answer(uint64_t launches, bool busy, bool quiet);

#endif

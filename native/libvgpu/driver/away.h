/*
 * away.h: a lease that is away (VGPU_LEASE_AWAY): its device memory is on the host, and whoever calls the
 * driver blocks in there, where nobody sees it. So calls that bring work or take memory wait here, in front
 * of the driver, and say in the slot that they do: vgpud then brings the lease back.
 */
#ifndef VGPU_AWAY_H
#define VGPU_AWAY_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

struct vgpu_away_words {
    _Alignas(64) uint64_t calls; /* that were counted here so far */
    _Alignas(64) uint32_t away;  /* 1: look closer before the driver is called */
};
extern struct vgpu_away_words vgpu_away;

/* Waits until the lease is back; returns at once if it is not away. */
void vgpu_away_wait(void);

static inline void vgpu_away_check(void)
{
    if (__builtin_expect(__atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED), 0))
        vgpu_away_wait();
}

/* In front of a driver call that is no launch. Of two threads' counts at once one may be lost: only whether the
 * figure moves is asked, and an add that is atomic costs 5 ns more. */
static inline void vgpu_away_call(void)
{
    uint64_t calls = __atomic_load_n(&vgpu_away.calls, __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_away.calls, calls + 1, __ATOMIC_RELAXED);
    vgpu_away_check();
}

/* Is it away now, or its memory not back yet? False before vgpu_away_start. */
bool vgpu_away_now(void);

/* What the page says now (enum vgpu_lease_state); 0 before vgpu_away_start. */
uint32_t vgpu_away_state(void);

/* Follows the page: takes note that the lease went, or wakes those who wait for it. */
void vgpu_away_follow(void);

/* --- for the link thread */

void vgpu_away_start(const struct vgpu_limits *limits, struct vgpu_slot *slot);

/* Writes the figures of the slot. `launches`: by weight. */
void vgpu_away_answer(uint64_t launches, bool busy, bool quiet);

void vgpu_away_reset(void);

#endif

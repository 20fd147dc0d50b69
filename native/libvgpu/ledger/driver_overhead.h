/*
 * driver_overhead.h: the driver's own memory (contexts, modules, local memory, streams), in bytes. It is the difference
 * between NVML's figure for this process and the allocations of the process's calls, and is kept in the slot's
 * context_bytes. If NVML has no figure, it stays unchanged.
 *
 * Precondition of each function: vgpu_tenant_enter has set *limited to true, and `device` is an index in the lease, 0
 * to vgpu_tenant_devices() - 1. Any thread may call them; one measurement is made at a time.
 *
 * A measurement costs about 10 us (H200, driver 580), so it is made after calls that may allocate such memory, and not
 * at every call.
 */
#ifndef VGPU_DRIVER_OVERHEAD_H
#define VGPU_DRIVER_OVERHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "invariant.h"

/*
 * Measures now. `claimed` bytes are claims of the caller itself. Returns false if NVML has no figure, or if other
 * threads changed the figures at each attempt (the next allocation then measures again).
 */
bool vgpu_overhead_look(int device, uint64_t claimed);

/* Measures once. Does nothing if another thread is measuring or NVML has not started. */
void vgpu_overhead_look_once(int device);

/*
 * Measures once on each device of the lease. Does nothing if another thread is measuring. The link's thread calls it
 * when vgpud asks for a report.
 */
void vgpu_overhead_look_all(void);

/* Called after a call that makes the driver allocate memory now or soon. The next allocation then measures first. */
void vgpu_overhead_later(int device);

extern uint32_t vgpu_overhead_stale; /* devices to measure before the next allocation, one bit each */
static inline void vgpu_overhead_if_stale(int device)
{
    if (__builtin_expect((__atomic_load_n(&vgpu_overhead_stale, __ATOMIC_RELAXED) >> device & 1) != 0, 0))
        vgpu_overhead_look_once(device);
}

/*
 * Counts `bytes` of a freed allocation as the driver's own memory, because the driver may keep them for now (a free in
 * stream order, a pool that ends before its allocations). They are measured at the next synchronisations and before a
 * refusal. If NVML has no figure, they stop counting then.
 */
void vgpu_overhead_instead(int device, uint64_t bytes);

/* Measures the bytes that vgpu_overhead_instead() counts on the device. Returns false if there are none. */
bool vgpu_overhead_leftovers(int device);
extern uint32_t vgpu_overhead_left; /* devices with leftover bytes, as bits */

/* Returns whether the bytes of the tenant, without claims, are within its limit on the device now. */
bool vgpu_overhead_within_limit(int device);

/* Counts bytes that are charged, but which NVML does not list for this process (managed memory). */
void vgpu_overhead_unseen(int device, int64_t bytes);

/* lower half: number of frees in progress; upper half: number of changes of charges */
extern uint64_t vgpu_overhead_moves;
#define VGPU_OVERHEAD_CHANGE (1ull << 32)
/* Records a change of this process's charges: a measurement that overlaps a change is repeated. */
static inline void vgpu_overhead_changed(void)
{
    __atomic_fetch_add(&vgpu_overhead_moves, VGPU_OVERHEAD_CHANGE, __ATOMIC_SEQ_CST);
}
static inline void vgpu_overhead_free_begins(void)
{
    __atomic_fetch_add(&vgpu_overhead_moves, 1, __ATOMIC_SEQ_CST);
}
static inline void vgpu_overhead_free_ends(void)
{
    VGPU_ASSERT((uint32_t)__atomic_load_n(&vgpu_overhead_moves, __ATOMIC_RELAXED) > 0);
    __atomic_fetch_add(&vgpu_overhead_moves, VGPU_OVERHEAD_CHANGE - 1, __ATOMIC_SEQ_CST);
}

#endif

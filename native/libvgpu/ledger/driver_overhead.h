/*
 * driver_overhead.h: the driver's own memory (contexts, modules, local memory, streams), in bytes. It is the difference
 * between NVML's figure for this process and the allocations of its calls, and is kept in the slot's context_bytes.
 * Without a figure of NVML it stays unchanged.
 *
 * Precondition of each function: vgpu_tenant_enter said limited, and `device` is an index in the lease, 0 to
 * vgpu_tenant_devices() - 1. Any thread may call them; one look is taken at a time.
 *
 * One measurement costs about 10 us (H200, driver 580), so it is made after calls that may allocate such memory, and
 * not at every call.
 */
#ifndef VGPU_DRIVER_OVERHEAD_H
#define VGPU_DRIVER_OVERHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "invariant.h"

/*
 * Measures now; `claimed` bytes are claims of the caller itself. False: NVML has no figure, or other threads allocated
 * all the time; then the next allocation measures again.
 */
bool vgpu_overhead_look(int device, uint64_t claimed);

/* Measures once, unless another thread is measuring. */
void vgpu_overhead_look_once(int device);

/*
 * Measures once on each device of the lease, unless another thread is measuring; for the link's thread, when vgpud
 * asks.
 */
void vgpu_overhead_look_all(void);

/* Called after a call that makes the driver allocate memory now or soon: the next allocation measures first. */
void vgpu_overhead_later(int device);

extern uint32_t vgpu_overhead_stale; /* one bit for each device */
static inline void vgpu_overhead_if_stale(int device)
{
    if (__builtin_expect((__atomic_load_n(&vgpu_overhead_stale, __ATOMIC_RELAXED) >> device & 1) != 0, 0))
        vgpu_overhead_look_once(device);
}

/*
 * Counts `bytes` of a freed allocation as driver overhead, because the driver may keep them for now (a free in stream
 * order, a pool that ends before its allocations). They are measured at the next synchronisations and before a refusal;
 * without a figure of NVML they are given back then.
 */
void vgpu_overhead_instead(int device, uint64_t bytes);

/* Measures such leftover bytes on the device; false: there are none. */
bool vgpu_overhead_leftovers(int device);
extern uint32_t vgpu_overhead_left; /* devices with leftover bytes, as bits */

/* Is the tenant within its limit on the device now? */
bool vgpu_overhead_within_limit(int device);

/* Counts bytes that are charged but that NVML does not show for this process (managed memory). */
void vgpu_overhead_unseen(int device, int64_t bytes);

/* Counts changes of this process's figures: a measurement that overlaps one is repeated. */
extern uint64_t vgpu_overhead_moves; /* lower half: frees in progress; upper half: number of changes */
#define VGPU_OVERHEAD_CHANGE (1ull << 32)
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

/*
 * driver_overhead.h: memory that the driver takes and no call names (contexts, modules, local memory, streams), in
 * bytes. It is the difference between what NVML says this process holds and what its calls account for, and is kept in
 * the slot's context_bytes. Where NVML cannot say, it stays as it was.
 *
 * Precondition of each function: vgpu_tenant_enter said limited, and `device` is an index in the lease, 0 to
 * vgpu_tenant_devices() - 1. Any thread may call them; one look is taken at a time.
 *
 * One look costs about 10 us (H200, driver 580), so it is taken when something happened that makes such
 * memory, never on every call.
 */
#ifndef VGPU_DRIVER_OVERHEAD_H
#define VGPU_DRIVER_OVERHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "invariant.h"

/* Looks now, with `claimed` bytes of this process being claims of the caller's own. False: NVML cannot say,
 * or other threads allocated all the while; then the next allocation looks again. */
bool vgpu_overhead_look(int device, uint64_t claimed);

/* Looks once, unless another thread does. */
void vgpu_overhead_look_once(int device);

/* Looks once at each device of the lease, unless another thread does; for the link's thread, when vgpud asks. */
void vgpu_overhead_look_all(void);

/* Something happened that makes the driver take memory now or soon: the next allocation looks first. */
void vgpu_overhead_later(int device);

extern uint32_t vgpu_overhead_stale; /* a bit a device */
static inline void vgpu_overhead_if_stale(int device)
{
    if (__builtin_expect((__atomic_load_n(&vgpu_overhead_stale, __ATOMIC_RELAXED) >> device & 1) != 0, 0))
        vgpu_overhead_look_once(device);
}

/*
 * `bytes` that calls accounted for belong to no allocation any more, but the driver may keep them for now (a free in
 * stream order, a pool that ends before its allocations): from now on they count as driver overhead. Looks
 * are taken at the next synchronisations and before a refusal; where NVML cannot say, they are given back there.
 */
void vgpu_overhead_instead(int device, uint64_t bytes);

/* Looks after such bytes, if there are any on the device; false: there are none. */
bool vgpu_overhead_leftovers(int device);
extern uint32_t vgpu_overhead_left; /* devices that have some */

/* Is the tenant within its limit on the device now? */
bool vgpu_overhead_within_limit(int device);

/* Bytes that are charged but that NVML does not show with this process (managed memory). */
void vgpu_overhead_unseen(int device, int64_t bytes);

/* The figures of this process changed, or are about to: a look that overlaps does not count. */
extern uint64_t vgpu_overhead_moves; /* lower half: calls that are freeing now; upper half: changes so far */
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

/*
 * gate.h: may this process launch now? Compute is given in turns (see lease.h): the arbiter says GRANT and
 * for how long; at the end the process stops launching, waits until nothing of its own is left on the
 * device, and says DONE. Without an arbiter the process keeps to its own duty cycle (duty.h).
 *
 * A launch in the common case is one addition, one relaxed load and a branch. `allow` is what the gate
 * and the pacing (pace.h) move: 0 while the gate is closed.
 */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"
#include "lease.h"

struct vgpu_gate_words {
    _Alignas(64) uint64_t count; /* launched so far, by weight */
    _Alignas(64) uint64_t allow; /* launches below this count need no look */
    uint64_t asked;              /* of count: in vgpu_gate_look, or on their way from it to the driver */
};
extern struct vgpu_gate_words vgpu_gate;

static inline bool vgpu_gate_passes(uint64_t weight)
{
    if (__builtin_expect(__atomic_load_n(&vgpu_gate.allow, __ATOMIC_RELAXED) == UINT64_MAX, 1))
        return true; /* not limited, or cut */
    uint64_t count = __atomic_add_fetch(&vgpu_gate.count, weight, __ATOMIC_RELAXED);
    return __builtin_expect(count < __atomic_load_n(&vgpu_gate.allow, __ATOMIC_RELAXED), 1);
}

/* The look at a launch of this weight: waits for a turn, paces, or finds out that this process is not limited.
 * A stream that is being captured is never delayed. An error of vgpu_tenant_enter means that nothing may run. */
CUresult vgpu_gate_look(CUstream stream, int per_thread, uint64_t weight);

/* After the launch that vgpu_gate_look let through. */
void vgpu_gate_launched(CUstream stream, int per_thread, uint64_t weight);

/* --- for the link thread */

/* `folder`: of the lease; its limits count while there is no arbiter. False: they cannot be mapped. */
bool vgpu_gate_start(const char *folder, struct vgpu_usage *usage, uint32_t slot);
void vgpu_gate_linked(void);
void vgpu_gate_unlinked(void);
void vgpu_gate_message(const struct vgpu_message *message);

/* Does what is due: the end of a turn, draining, idleness, the duty cycle. Returns the nanoseconds
 * until it is to be called again, or -1: only after a message. */
int64_t vgpu_gate_tick(void);

void vgpu_gate_reset(void);

#endif

/*
 * gate.h: decides whether this process may launch now. Compute is granted in time slices (see lease.h): the arbiter
 * sends GRANT with a length. At its end the process stops launching, waits until none of its work is left on the
 * device, and sends DONE. Without an arbiter the process follows its own duty cycle (duty.h).
 *
 * A launch of a process without a limit costs one relaxed load and a branch. Within a time slice it also costs an
 * atomic addition, and a second load and branch. The gate and the count of work in flight (in_flight.h) set the word
 * `allow`, which is 0 while the gate is closed.
 *
 * Any thread may launch. vgpu_gate_look waits, without a time limit, until the arbiter grants a time slice, or without
 * an arbiter until the duty cycle allows one. It holds no lock meanwhile, and is no cancellation point.
 */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"
#include "launches.h"

static inline bool vgpu_gate_passes(uint64_t weight)
{
    if (__builtin_expect(__atomic_load_n(&vgpu_launches.allow, __ATOMIC_RELAXED) == UINT64_MAX, 1))
        return true; /* the process is not limited, or is under the engine cut */
    uint64_t count = __atomic_add_fetch(&vgpu_launches.count, weight, __ATOMIC_RELAXED);
    return __builtin_expect(count < __atomic_load_n(&vgpu_launches.allow, __ATOMIC_RELAXED), 1);
}

/*
 * Checks a launch of this weight: waits for a slice, paces the launch, or finds that this process is not limited. A
 * launch on a stream that is being captured waits only while the lease is suspended. If it returns an error, the launch
 * must not run.
 */
CUresult vgpu_gate_look(CUstream stream, int per_thread, uint64_t weight);

/* Called after a launch that vgpu_gate_look admitted. */
void vgpu_gate_launched(uint64_t weight);

#endif

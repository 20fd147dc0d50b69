/*
 * duty.h: the duty cycle by which a process limits itself to its share while there is no arbiter. Periods begin at the
 * same times for all processes of the node that share a time namespace. A process may launch in the first part of a
 * period, so several processes of one tenant use the same part.
 */
#ifndef VGPU_DUTY_H
#define VGPU_DUTY_H

#include <stdint.h>

#include "lease.h"

#define VGPU_DUTY_PERIOD_NS 40000000u

struct vgpu_duty {
    uint64_t period; /* number of the period at the last check */
    double debt_ns;  /* overrun that later slices pay back, in nanoseconds */
};

/* Precondition of all these functions: the caller holds the lock that guards `duty`. Times are CLOCK_MONOTONIC. */

/*
 * Returns the length in nanoseconds of the slice that may begin now; 0 if none may, and then *wait_ns is the time to
 * wait. `share` is the share of the device, 0 to 1.
 */
uint64_t vgpu_duty_turn(struct vgpu_duty *duty, double share, uint64_t now_ns, uint64_t *wait_ns);

/*
 * Returns the smallest share of the lease's devices, 0 to 1; negative if no device is limited. Returns `before` if
 * `limits` is NULL or the page cannot be read, so that the last known share stays in force.
 */
double vgpu_duty_share(const struct vgpu_limits *limits, double before);

/* Records that a slice ended `overrun_ns` late. The next slices are shorter by that time, up to a second in all. */
void vgpu_duty_overrun(struct vgpu_duty *duty, uint64_t overrun_ns);

#endif

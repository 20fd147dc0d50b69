/*
 * duty.h: the share that a process keeps to by itself while there is no arbiter. Time is cut into periods
 * at the same points for every process of the node, and each may launch in the first part of a period,
 * so that several processes of one tenant use the same part and not one after the other.
 */
#ifndef VGPU_DUTY_H
#define VGPU_DUTY_H

#include <stdint.h>

#include "lease.h"

#define VGPU_DUTY_PERIOD_NS 40000000u

struct vgpu_duty {
    uint64_t period; /* of the last look */
    double debt_ns;  /* overrun that is still to be paid back */
};

/* All functions need the caller's lock on `duty`. Times are CLOCK_MONOTONIC. */

/* Length in nanoseconds of the turn that may begin now; 0: none may, and *wait_ns is how long to wait. `share` is the
 * share of the device, 0 to 1. */
uint64_t vgpu_duty_turn(struct vgpu_duty *duty, double share, uint64_t now_ns, uint64_t *wait_ns);

/* The least share of the lease's devices, 0 to 1; negative: no device is limited. `before` if `limits` is NULL or the
 * page cannot be read: the last known share stays in force. */
double vgpu_duty_share(const struct vgpu_limits *limits, double before);

/* A turn ended `overrun_ns` after its end; the next ones are shorter by as much, up to a second in all. */
void vgpu_duty_overrun(struct vgpu_duty *duty, uint64_t overrun_ns);

#endif

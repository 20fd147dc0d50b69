/*
 * hami_limits.h: reads limits from HAMi's variables, so that HAMi's users can migrate. The variables count only in a
 * process without a lease, and are parsed strictly: an invalid value is an error, never "no limit".
 *
 *   CUDA_DEVICE_MEMORY_LIMIT, CUDA_DEVICE_MEMORY_LIMIT_<i>   bytes, or whole k, m, g (1024s), as in 3000m
 *   CUDA_DEVICE_SM_LIMIT, CUDA_DEVICE_SM_LIMIT_<i>           percent of the compute time, 1 to 100; 0: no limit
 *   GPU_CORE_UTILIZATION_POLICY                              DEFAULT, FORCE; DISABLE: no compute limit
 *
 * <i> is the device as the process counts it (CUDA's ordinal); a variable with a number has precedence over the one
 * without.
 *
 * Pure: reads its argument only.
 */
#ifndef VGPU_HAMI_LIMITS_H
#define VGPU_HAMI_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

struct vgpu_hami_limits {
    uint64_t memory_bytes[VGPU_MAX_DEVICES]; /* 0: memory is not limited */
    uint32_t share[VGPU_MAX_DEVICES];        /* compute share in hundredths of a percent; 0: not limited */
};

/* Returns whether the environment (environ(7)) contains HAMi's variables for limits. */
bool vgpu_hami_asked(char *const *environment);

/* Reads HAMi's variables. Returns NULL, or the invalid variable as NAME=VALUE. */
const char *vgpu_hami_read(char *const *environment, struct vgpu_hami_limits *limits);

#endif

/*
 * pool.h: memory pools. A pool is charged for the memory that it has reserved on the card, by the driver's figure,
 * which NVML counts too: live requests, memory kept for later, and the rounding to its blocks.
 *
 * Any thread may call this function.
 */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

/* A pool grows by 32 MiB blocks, by no more than the request needs (measured on an H200, driver 580). */
#define VGPU_POOL_GRAIN (32u << 20)

/* Called after a synchronisation, when pools give memory back. Costs one load unless a pool holds memory. */
void vgpu_pool_synchronised(void);

#endif

/*
 * pool.h: memory pools. A pool is charged for the memory that it has reserved on the card, by the driver's figure. NVML
 * counts the same memory: live requests, memory kept for later, and the rounding to the pool's blocks.
 */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

/* A pool grows in blocks of 32 MiB, by no more than the request needs (measured on an H200, driver 580). */
#define VGPU_POOL_GRAIN (32u << 20)

/*
 * Called after a synchronisation, when pools return memory to the driver. Costs one load if no pool has held memory so
 * far. Any thread may call this function.
 */
void vgpu_pool_synchronised(void);

#endif

/*
 * process_memory.h: the memory that this process holds according to NVML.
 *
 * Precondition: vgpu_tenant_enter has set *limited to true, and `device` is an index in the lease.
 */
#ifndef VGPU_PROCESS_MEMORY_H
#define VGPU_PROCESS_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Finds the bytes of device memory that this process holds on a device. Returns false if NVML has no figure. Not
 * thread-safe: the caller holds a lock.
 */
bool vgpu_process_memory(unsigned device, uint64_t *bytes);

/* Starts NVML on another thread, which takes some milliseconds. */
void vgpu_process_memory_warm(void);

/* Returns whether NVML has started. If not, a measurement would wait for it. */
bool vgpu_process_memory_ready(void);

#endif

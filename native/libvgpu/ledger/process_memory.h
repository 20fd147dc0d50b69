/*
 * process_memory.h: what NVML says this process holds.
 *
 * Precondition: vgpu_tenant_enter said limited; `device` is an index in the lease.
 */
#ifndef VGPU_PROCESS_MEMORY_H
#define VGPU_PROCESS_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes of device memory of this process on a device of the lease; false if NVML cannot say. Not
 * thread-safe: the caller has a lock. */
bool vgpu_process_memory(unsigned device, uint64_t *bytes);

/* Starts NVML on another thread, which takes some milliseconds. */
void vgpu_process_memory_warm(void);

/* Has NVML started? If not, a measurement would wait for it. */
bool vgpu_process_memory_ready(void);

#endif

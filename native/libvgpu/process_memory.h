/* process_memory.h: what NVML says this process holds. */
#ifndef VGPU_PROCESS_MEMORY_H
#define VGPU_PROCESS_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes of device memory of this process on the device with this UUID; false if NVML cannot say. */
bool vgpu_process_memory(const char *uuid, uint64_t *bytes);

#endif

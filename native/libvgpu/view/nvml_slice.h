/*
 * nvml_slice.h: the lease for NVML's wrappers. A program that only reads (nvidia-smi) never calls cuInit, so this
 * module reads the lease without claiming a slot or registering.
 *
 * Any thread may call these functions. Sizes are bytes.
 */
#ifndef VGPU_NVML_SLICE_H
#define VGPU_NVML_SLICE_H

#include <stdbool.h>

#include "cuda_api.h"
#include "lease_open.h"

/* Returns the mapped lease of this process, or NULL. `usage` is NULL if it cannot be opened for reading and writing. */
const struct vgpu_lease_view *vgpu_nvml_lease(void);

/*
 * Returns the index in the lease of a device or MIG device, by its UUID, and its memory limit; -1 if the device is not
 * in the lease.
 */
int vgpu_nvml_index(nvmlDevice_t device, uint64_t *limit_bytes);

/*
 * Lists the processes of the lease that hold memory on device `index`, by their pids in the caller's pid namespace;
 * those that are not visible there are left out. Stores at most `most`; returns the number of all.
 */
unsigned vgpu_nvml_processes(int index, nvmlProcessInfo_t *processes, unsigned most);

#endif

/*
 * nvml_slice.h: the lease as NVML's wrappers see it. A program that only reads (nvidia-smi) never calls cuInit, so this
 * module reads the lease without claiming a slot or registering.
 *
 * Any thread may call these functions. Sizes are bytes.
 */
#ifndef VGPU_NVML_SLICE_H
#define VGPU_NVML_SLICE_H

#include <stdbool.h>

#include "cuda_api.h"
#include "lease_open.h"

/* The lease of this process, mapped; NULL if it has none. usage is NULL if this user may not read it. */
const struct vgpu_lease_view *vgpu_nvml_lease(void);

/* Index in the lease of a device or MIG device by its UUID, and its memory limit; -1: not in the lease. */
int vgpu_nvml_index(nvmlDevice_t device, uint64_t *limit_bytes);

/* Pids of the live processes of the lease, as the caller's pid namespace names them, with the memory of
 * each on the device `index`. Returns how many there are, of which at most `most` are given. */
unsigned vgpu_nvml_processes(int index, nvmlProcessInfo_t *processes, unsigned most);

#endif

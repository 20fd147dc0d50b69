/* The driver's process checkpoint calls, branch 570 and later (CUDA driver API, "CUDA checkpointing").
 *
 * Every call names the process by its pid in this program's pid namespace. Results are the driver's own;
 * CUDA_ERROR_NOT_SUPPORTED where the installed branch lacks the call. */
#ifndef VGPU_SUSPEND_DRIVER_H
#define VGPU_SUSPEND_DRIVER_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

#define DRIVER_PAIRS_MAX 64

/* Opens libcuda and initialises it (a restore needs that). Returns NULL, or the reason of the failure. */
const char *driver_open(void);

/* Returns the constant's name as in cuda.h. */
const char *driver_name(CUresult result);

CUresult driver_state(int pid, CUprocessState *state);

/*
 * Waits for the process's calls under way: at most timeout_ms, without limit if 0. After a timeout the process stays
 * running.
 */
CUresult driver_lock(int pid, unsigned int timeout_ms);

/* Copies the memory of a locked process to the host and frees it on the device. */
CUresult driver_save(int pid);

/* Restores the memory of a saved process, to other devices if pairs are given; the process stays locked. */
CUresult driver_restore(int pid, const CUcheckpointGpuPair *pairs, unsigned int count);

CUresult driver_unlock(int pid);

/* "GPU-" and 32 hexadecimal digits in five groups, as NVML writes it. */
bool driver_uuid(const char *text, CUuuid *uuid);

#endif

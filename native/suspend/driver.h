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

/* Opens libcuda and initialises it (a restore needs that). NULL, or why not. */
const char *driver_open(void);

/* The constant's name as cuda.h has it. */
const char *driver_name(CUresult result);

CUresult driver_state(int pid, CUprocessState *state);

/* Waits at most timeout_ms for the process's calls under way, without end if 0; it stays running then. */
CUresult driver_lock(int pid, unsigned int timeout_ms);

/* The memory of a locked process goes to the host. */
CUresult driver_save(int pid);

/* The memory of a saved process comes back, to other devices where there are pairs; it stays locked. */
CUresult driver_restore(int pid, const CUcheckpointGpuPair *pairs, unsigned int count);

CUresult driver_unlock(int pid);

/* "GPU-" and 32 hexadecimal digits in five groups, as NVML writes it. */
bool driver_uuid(const char *text, CUuuid *uuid);

#endif

/*
 * The driver's process checkpoint calls, in branch 570 and later (CUDA driver API, "CUDA checkpointing").
 *
 * Every call names the process by its pid in this program's pid namespace. The results are the driver's own.
 * Precondition: driver_open has succeeded, which it does not if the installed branch lacks a call.
 */
#ifndef VGPU_SUSPEND_DRIVER_H
#define VGPU_SUSPEND_DRIVER_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

#define DRIVER_PAIRS_MAX 64

/* Opens libcuda and initialises it, which a restore needs. Returns NULL, or the reason of the failure. */
const char *driver_open(void);

/* Returns the name that cuda.h gives to this result. */
const char *driver_name(CUresult result);

CUresult driver_state(int pid, CUprocessState *state);

/*
 * Locks a process: waits for the calls that it has under way, at most timeout_ms, or without limit if timeout_ms is 0.
 * After a timeout the process is not locked and goes on running.
 */
CUresult driver_lock(int pid, unsigned int timeout_ms);

/* Copies the memory of a locked process to the host and frees it on the device. */
CUresult driver_save(int pid);

/* Restores the memory of a saved process, to other devices if `pairs` names some; the process stays locked. */
CUresult driver_restore(int pid, const CUcheckpointGpuPair *pairs, unsigned int count);

CUresult driver_unlock(int pid);

/* The driver's functions that copies of parked memory need (copy.h). */
extern struct driver_copy {
    __typeof__(&cuDeviceGetCount) count;
    __typeof__(&cuDeviceGet) device;
    __typeof__(&cuDeviceGetUuid_v2) uuid;
    __typeof__(&cuDeviceCanAccessPeer) reaches;
    __typeof__(&cuDevicePrimaryCtxRetain) retain;
    __typeof__(&cuCtxSetCurrent) current;
    __typeof__(&cuStreamCreate) stream;
    __typeof__(&cuEventCreate) event;
    __typeof__(&cuEventRecord) record;
    __typeof__(&cuEventSynchronize) wait;
    __typeof__(&cuStreamWaitEvent) after;
    __typeof__(&cuMemcpyDtoDAsync) copy;
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemAddressFree) unreserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemSetAccess) access;
} cuda_copy;

/* Looks up the functions of cuda_copy. Returns false if the driver lacks one. */
bool driver_copies(void);

/* Reads a UUID as NVML writes it: "GPU-" and 32 hexadecimal digits in five groups. Returns false for other text. */
bool driver_uuid(const char *text, CUuuid *uuid);

#endif

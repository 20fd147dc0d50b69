/*
 * Copies the parked memory of a process (native/common/lease.h) from one device to another. The process cannot copy the
 * memory itself, because it sees only one of the two devices at a time.
 *
 * The descriptors and the list are the process's, and hostile: only a sealed file is read as a list, and the driver
 * refuses descriptors that are not exported memory, and sizes that are not theirs.
 */
#ifndef VGPU_SUSPEND_COPY_H
#define VGPU_SUSPEND_COPY_H

#include <cuda.h>

/*
 * Chooses the devices of the copies. Returns CUDA_ERROR_NOT_SUPPORTED if they do not reach each other, the driver lacks
 * a function for the copies, or this program may not copy the process's descriptors; CUDA_ERROR_INVALID_VALUE if other
 * devices were chosen before; or the driver's error.
 */
CUresult copy_reach(int pidfd, const CUuuid *from, const CUuuid *to);

/*
 * Starts a thread that makes what the copies need on the chosen devices: contexts on both, and a buffer (0.1 s on an
 * H200). Does nothing if no devices are chosen, and at a second call.
 */
void copy_open(void);

/*
 * Copies the blocks that a list names in order, and writes to the list how many are copied, and at the end the result.
 * The list is a sealed memory file, the process's descriptor `number`. Returns the result; CUDA_ERROR_NOT_FOUND if the
 * descriptor is no list that waits for a copy; the error of copy_open's thread if that has failed. Precondition:
 * copy_reach has succeeded.
 */
CUresult copy_list(int pidfd, int number);

/* Waits for the thread of copy_open: a program that ends while a thread is in the driver may hang. */
void copy_wait(void);

#endif

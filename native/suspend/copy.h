/*
 * Copies the parked memory of a process (native/common/lease.h) from one device to another. The process cannot do it:
 * it sees one of the two devices at a time.
 *
 * The descriptors and the list are the process's, and hostile: only a sealed file is read as a list, and the driver
 * refuses descriptors that are not exported memory, and sizes that are not theirs.
 */
#ifndef VGPU_SUSPEND_COPY_H
#define VGPU_SUSPEND_COPY_H

#include <cuda.h>

/*
 * Chooses the devices of the copies. Returns CUDA_ERROR_NOT_SUPPORTED if they do not reach each other, or descriptors of
 * the process cannot be got.
 */
CUresult copy_reach(int pidfd, const CUuuid *from, const CUuuid *to);

/*
 * Lets a thread make what the copies need on these devices: contexts on both, and a buffer (0.2 s on an H200). Does
 * nothing if no devices are chosen, and at a second call.
 */
void copy_open(void);

/*
 * Copies the blocks of the list that descriptor `number` of the process has, and writes the result there. Returns
 * CUDA_ERROR_NOT_FOUND if it is no list that asks for this, and the error of copy_open's thread if that has failed.
 * Precondition: copy_reach.
 */
CUresult copy_list(int pidfd, int number);

/* Waits for that thread: a program that ends while it is in the driver may hang. */
void copy_wait(void);

#endif

/*
 * parked.h: evictable memory that waits on its device while the driver moves the process to another one. The chunks are
 * copied into blocks of memory that is exported and then released: for the driver the process no longer has this
 * memory, and the exported descriptors alone keep it. So no other process must live on to keep the memory, and a move
 * that is undone finds the memory where it was. On the new device, which cannot be reached from here, vgpud has the
 * blocks copied into new ones (lease.h, vgpu_parked_list).
 *
 * Precondition of each function: the caller is the thread of swap.h. Of all but vgpu_parked_end: no other thread is
 * inside, and a context of the device is current.
 */
#ifndef VGPU_PARKED_H
#define VGPU_PARKED_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/* Parks the chunks that are on the device, until no block can be made. Does nothing while blocks are parked already. */
void vgpu_parked_out(CUstream stream);

/*
 * Brings all parked chunks back. If the process is on another device than the blocks, or cannot import them, it asks
 * vgpud for copies of them and waits, until `stop` returns true (then CUDA_ERROR_NOT_READY). After an error, chunks may
 * still be parked, and the next call continues.
 */
CUresult vgpu_parked_in(CUstream stream, bool (*stop)(void));

/*
 * Frees the blocks on the device that the process has left, if chunks have come back from there. This takes 1 ms a GiB
 * (H200), so the program works meanwhile. vgpu_parked_behind returns their number.
 */
void vgpu_parked_end(void);
unsigned vgpu_parked_behind(void);

/*
 * Undoes what an unfinished vgpu_parked_in did with the chunks that are still parked: unmaps them, and gives up the
 * process's handles of their blocks. The blocks stay.
 */
void vgpu_parked_away(void);

/* From now on, requests to copy parked blocks (VGPU_SWAP_COMING) are written to *phase. */
void vgpu_parked_start(uint32_t *phase);

#endif

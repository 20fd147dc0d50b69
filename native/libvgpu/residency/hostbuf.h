/*
 * hostbuf.h: page-locked host memory for device memory that is off the card. It is one range of offsets over several
 * segments, which are made when they are first needed, and kept. Locking memory takes far longer than copying it: 0.33
 * s per GiB on an H200's host with cuMemHostAlloc; memory that several threads touch and that is then registered is a
 * few times faster.
 */
#ifndef VGPU_HOSTBUF_H
#define VGPU_HOSTBUF_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

#define VGPU_HOSTBUF_STEP_BYTES (1ull << 30)
#define VGPU_HOSTBUF_PAGE_BYTES (2ull << 20) /* the unit in which the buffer is handed out */

/* Gives back a page of the buffer. Any thread may call it. */
void vgpu_hostbuf_give(uint32_t page);

/*
 * Only the thread of swap.h may call the functions below. vgpu_hostbuf_unlocked may be called by another thread while
 * vgpu_evict_stop keeps that thread from the buffer.
 *
 * vgpu_hostbuf_take takes the first page without an owner from page number *page on, and sets *page to its number. It
 * returns false if there is none. vgpu_hostbuf_free returns the number of pages without an owner.
 */
bool vgpu_hostbuf_take(uint32_t *page);
uint64_t vgpu_hostbuf_free(void);

/*
 * vgpu_hostbuf_grow makes the buffer at least `bytes` large, segment by segment, in the current context. If it returns
 * an error, the segments made so far stay.
 */
CUresult vgpu_hostbuf_grow(uint64_t bytes);

/*
 * Returns the address of `offset`, and sets *bytes to the number of bytes that follow it in its segment. Precondition:
 * `offset` is below vgpu_hostbuf_bytes().
 */
void *vgpu_hostbuf_at(uint64_t offset, uint64_t *bytes);

/* Returns the size of the buffer in bytes. */
uint64_t vgpu_hostbuf_bytes(void);

/*
 * vgpu_hostbuf_lock page-locks the segments that are not locked. When a context ends, the driver unlocks the segments
 * that were locked in it; vgpu_hostbuf_unlocked then records that no segment is locked.
 */
CUresult vgpu_hostbuf_lock(void);
void vgpu_hostbuf_unlocked(void);

/* Page-locks the segment of `offset` if it is not locked. If locking fails, copies are slower but still correct. */
void vgpu_hostbuf_lock_at(uint64_t offset);

/* Unlocks all segments. Any context may be current. A segment that the driver does not unlock stays locked. */
void vgpu_hostbuf_unlock(void);

void vgpu_hostbuf_reset(void);

#endif

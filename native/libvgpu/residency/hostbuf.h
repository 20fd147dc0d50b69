/*
 * hostbuf.h: page-locked host memory for what is off the card: one range of offsets over several segments, made when
 * it is first needed and kept. Locking it takes far longer than a copy (0.33 s a GiB on an H200's host with
 * cuMemHostAlloc; touched by several threads and then registered it is a few times faster).
 */
#ifndef VGPU_HOSTBUF_H
#define VGPU_HOSTBUF_H

#include <stdint.h>

#include "cuda_api.h"

#define VGPU_HOSTBUF_STEP_BYTES (1ull << 30)

/* All functions are for the thread of swap.h. Makes room for `bytes` in all, in the current context. An error: the room
 * is as before. */
CUresult vgpu_hostbuf_grow(uint64_t bytes);

/* The address of `offset`; sets *bytes to how many bytes follow it in its segment. Precondition: `offset` is below
 * vgpu_hostbuf_bytes(). */
void *vgpu_hostbuf_at(uint64_t offset, uint64_t *bytes);

/* Bytes of room. */
uint64_t vgpu_hostbuf_bytes(void);

/* Page-locks the segments that are not: the end of the context in which they were locked unlocks them, which
 * vgpu_hostbuf_unlocked records. */
CUresult vgpu_hostbuf_lock(void);
void vgpu_hostbuf_unlocked(void);

void vgpu_hostbuf_reset(void);

#endif

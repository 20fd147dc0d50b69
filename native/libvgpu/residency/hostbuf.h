/*
 * hostbuf.h: page-locked host memory for what is off the card: one range of places over several segments, made when
 * it is first needed and kept. Locking it takes far longer than a copy (0.33 s a GiB on an H200's host with
 * cuMemHostAlloc; touched by several threads and then registered it is a few times faster).
 */
#ifndef VGPU_HOSTBUF_H
#define VGPU_HOSTBUF_H

#include <stdint.h>

#include "cuda_api.h"

/* Room for `bytes` in all, in the current context; an error: there is as much as before. */
CUresult vgpu_hostbuf_grow(uint64_t bytes);

/* Where `place` is, and how many bytes follow it there. */
void *vgpu_hostbuf_at(uint64_t place, uint64_t *bytes);

uint64_t vgpu_hostbuf_bytes(void);

/* Locks what is not locked, as after the end of the context in which it was. */
CUresult vgpu_hostbuf_lock(void);
void vgpu_hostbuf_unlocked(void);

void vgpu_hostbuf_reset(void);

#endif

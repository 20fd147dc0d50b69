/*
 * evict_copy.h: copies the evictable memory of the process to the host and back, several chunks in flight. Precondition
 * of each function: the caller is the thread of swap.h, which has made sure that no other thread is inside;
 * vgpu_evict_forget and vgpu_evict_start excepted.
 */
#ifndef VGPU_EVICT_COPY_H
#define VGPU_EVICT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/* Takes chunks out until at most `kept` bytes are on the device. The physical memory of a chunk is released when its
 * copy is whole. Chunks that are out stay out. False: it failed, and some chunks may be out; see vgpu_evict_error. */
bool vgpu_evict_out(uint64_t kept);

/* Bytes of evictable memory, how many of them are on the device, and those of the largest chunk. */
struct vgpu_evict_bytes {
    uint64_t all;
    uint64_t here;
    uint64_t largest;
};
struct vgpu_evict_bytes vgpu_evict_count(void);

/* Brings back the chunks that are out. False: some are out still, since the card is full or `stop` returned true; the
 * next call goes on, or vgpu_evict_in_undo puts out again those that came back, whose copies are still valid. `stop`
 * is asked between chunks; it may be NULL. */
bool vgpu_evict_in(bool (*stop)(void));
void vgpu_evict_in_undo(void);

/*
 * Makes a step of the host's buffer for `bytes` while the program goes on. False: there is enough, or it failed. May be
 * called while threads are inside; vgpu_evict_forget waits for the step.
 */
bool vgpu_evict_prepare(uint64_t bytes);

/* The last error of the driver in vgpu_evict_out or vgpu_evict_in. */
CUresult vgpu_evict_error(void);

/* The context ends, and with it the streams that copies use in it. Precondition: the caller is inside. */
void vgpu_evict_forget(CUcontext context);

/* `host_bytes` is kept at the size of the host's buffer from now on. Called once, before any thread is inside. */
void vgpu_evict_start(uint64_t *host_bytes);

#endif

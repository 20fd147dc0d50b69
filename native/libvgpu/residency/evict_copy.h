/*
 * evict_copy.h: copies the evictable memory of the process to the host and back, with several chunks in flight.
 * Precondition of each function except vgpu_evict_forget and vgpu_evict_start: the caller is the thread of swap.h,
 * which has made sure that no other thread is inside.
 */
#ifndef VGPU_EVICT_COPY_H
#define VGPU_EVICT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/*
 * Takes chunks out until at most `kept` bytes are on the device. The physical memory of a chunk is released when its
 * copy is complete. Chunks that are already out stay out. Returns false if it failed, and then some chunks may be out;
 * see vgpu_evict_error.
 */
bool vgpu_evict_out(uint64_t kept);

/* The bytes of evictable memory, those of them that are on the device, and those of the largest chunk. */
struct vgpu_evict_bytes {
    uint64_t all;
    uint64_t here;
    uint64_t largest;
};
struct vgpu_evict_bytes vgpu_evict_count(void);

/*
 * Brings back the chunks that are out. Returns false if some are still out, because the card is full or `stop` returned
 * true. Then the next call continues, or vgpu_evict_in_undo takes those that came back out again; their copies are
 * still valid. `stop` is called between chunks, and may be NULL.
 */
bool vgpu_evict_in(bool (*stop)(void));
void vgpu_evict_in_undo(void);

/*
 * Makes one step of enlarging the host buffer to `bytes`, while the program continues. Returns false if it is large
 * enough, or if the step failed. May be called while threads are inside; vgpu_evict_forget waits for the step.
 */
bool vgpu_evict_prepare(uint64_t bytes);

/* The last error of the driver in vgpu_evict_out or vgpu_evict_in. */
CUresult vgpu_evict_error(void);

/* Called before a context ends: drops the streams that copies use in it. Precondition: the caller is inside. */
void vgpu_evict_forget(CUcontext context);

/* From now on keeps *host_bytes at the size of the host buffer. Called once, before any thread is inside. */
void vgpu_evict_start(uint64_t *host_bytes);

#endif

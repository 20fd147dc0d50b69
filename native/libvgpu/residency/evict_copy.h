/*
 * evict_copy.h: copies the evictable memory of the process to the host and back, several chunks in flight. Precondition
 * of each function: the caller is the thread of swap.h, which has made sure that no other thread is inside; the last
 * four functions excepted.
 */
#ifndef VGPU_EVICT_COPY_H
#define VGPU_EVICT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/*
 * Takes chunks out until at most `kept` bytes are on the device. The physical memory of a chunk is released when its
 * copy is complete. A chunk whose contents are those of its last copy (digest.h) is not copied again. Chunks that are already out stay out. Returns false if it failed, and then some chunks may be out;
 * see vgpu_evict_error.
 */
bool vgpu_evict_out(uint64_t kept);

/*
 * Parks the chunks on their device (parked.h), as far as there are room and descriptors. The others stay for
 * vgpu_evict_out.
 */
void vgpu_evict_park(void);

/*
 * Unlocks the host buffers after vgpu_evict_out: the driver's checkpoint of a process takes longer with page-locked
 * memory. vgpu_evict_in locks them again, piece by piece beside its copies.
 */
void vgpu_evict_unlock(void);

/* The bytes of evictable memory, and those of them that are on the device. */
struct vgpu_evict_bytes {
    uint64_t all;
    uint64_t here;
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
 * Makes a step of the host's buffer for `bytes` while the program goes on. False: there is enough, or it failed. May be
 * called while threads are inside; vgpu_evict_stop waits for the step.
 */
bool vgpu_evict_prepare(uint64_t bytes);

/* Returns the last error of the driver in vgpu_evict_out or vgpu_evict_in. */
CUresult vgpu_evict_error(void);

/* Between the two calls no step of vgpu_evict_prepare is made. Precondition of stop: the caller is inside. */
void vgpu_evict_stop(void);
void vgpu_evict_go_on(void);

/* The context has ended, and with it the streams that copies used in it. Precondition: vgpu_evict_stop was called. */
void vgpu_evict_forget(CUcontext context);

/*
 * From now on keeps *host_bytes at the size of the host buffer, and asks for copies of parked memory in *phase. Called
 * once, before any thread is inside.
 */
void vgpu_evict_start(uint64_t *host_bytes, uint32_t *phase);

#endif

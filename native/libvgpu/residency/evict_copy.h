/*
 * evict_copy.h: copies the evictable memory of the process to the host and back, several chunks in flight. The caller
 * of each function must be the thread of swap.h, and must have made sure that no other thread is inside. The comments
 * of vgpu_evict_prepare and of the functions below it name the exceptions.
 */
#ifndef VGPU_EVICT_COPY_H
#define VGPU_EVICT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/*
 * Evicts chunks until at most `kept` bytes are on the device. The physical memory of a chunk is released when its copy
 * is complete. A chunk whose contents equal its last copy (digest.h) is not copied again. Chunks that are already out
 * stay out. Returns false after an error (vgpu_evict_error); some chunks may then be out.
 */
bool vgpu_evict_out(uint64_t kept);

/*
 * Parks chunks on their device (parked.h), as long as there are room and descriptors. The other chunks stay on the
 * device, and vgpu_evict_out can evict them.
 */
void vgpu_evict_park(void);

/*
 * Called after vgpu_evict_out if the driver saves the process next. Unlocks the host buffers, because the driver's
 * checkpoint of a process takes longer with page-locked memory. Lowers the context's stack limit, because the driver
 * would save the local memory of all threads that the device runs at once (260 MiB, 0.19 s on an H200), although no
 * kernel runs. vgpu_evict_in locks the buffers again, piece by piece beside its copies, and sets the limit again.
 */
void vgpu_evict_ready(void);

/* The bytes of evictable memory, and those of them that are on the device. */
struct vgpu_evict_bytes {
    uint64_t all;
    uint64_t here;
};
struct vgpu_evict_bytes vgpu_evict_count(void);

/*
 * Brings back the chunks that are out. Returns false if some are still out: the card is full, the driver failed, or
 * `stop` returned true. Another call continues. vgpu_evict_in_undo instead unmaps the chunks that came back, whose
 * copies on the host are still valid. `stop` is called between chunks, and may be NULL.
 */
bool vgpu_evict_in(bool (*stop)(void));
void vgpu_evict_in_undo(void);

/*
 * Grows the host buffer towards `bytes` by at most VGPU_PREPARE_STEP_BYTES, while the program continues. Returns false
 * if the buffer is large enough, there is no evictable memory, or the driver failed. May be called while threads are
 * inside; vgpu_evict_stop waits for its end.
 */
bool vgpu_evict_prepare(uint64_t bytes);

/*
 * Returns the last error of the driver in vgpu_evict_out, vgpu_evict_in or vgpu_evict_prepare. vgpu_evict_prepare first
 * sets it to CUDA_SUCCESS.
 */
CUresult vgpu_evict_error(void);

/*
 * Any thread may call these two functions. Between the two calls, vgpu_evict_prepare waits. Precondition of
 * vgpu_evict_stop: the caller is inside.
 */
void vgpu_evict_stop(void);
void vgpu_evict_go_on(void);

/*
 * Called by any thread when `context` has ended, and with it the stream and the events that copies used there.
 * Precondition: vgpu_evict_stop was called.
 */
void vgpu_evict_forget(CUcontext context);

/*
 * From now on keeps *host_bytes at the size of the host buffer, and asks for copies of parked memory in *phase. Called
 * once, before any thread is inside.
 */
void vgpu_evict_start(uint64_t *host_bytes, uint32_t *phase);

#endif

/*
 * drain.h: waits for all work of a context on drivers without cuCtxRecordEvent (before CUDA 12.5): a separate thread
 * blocks in cuCtxSynchronize, so that launching threads need not.
 *
 * Any thread may call these functions. The drain thread calls the driver with no lock held but that against new
 * captures, which cuCtxSynchronize would invalidate. While a capture is in progress, a requested synchronization ends
 * at once.
 */
#ifndef VGPU_DRAIN_H
#define VGPU_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

enum vgpu_drain_state { VGPU_DRAIN_BY_MARKERS, VGPU_DRAIN_BY_EVENT, VGPU_DRAIN_BY_THREAD };

/* The job for one context. The caller zeroes it first, and must not free it before vgpu_drain_thread_forget. */
struct vgpu_drain_job {
    struct vgpu_drain_job *next;
    CUcontext context; /* NULL: the drain thread has no such job */
    uint64_t asked;
    uint64_t done;
};

/*
 * Requests one synchronization of the context, which begins after this call. Returns false if there is no thread for
 * it.
 */
bool vgpu_drain_thread_ask(struct vgpu_drain_job *job, CUcontext context);

/* Returns whether the last requested synchronization has ended. */
bool vgpu_drain_thread_done(const struct vgpu_drain_job *job);

/*
 * Called before the context ends. Returns when the drain thread is out of the context; the job's memory may then be
 * freed.
 */
void vgpu_drain_thread_forget(struct vgpu_drain_job *job);

#endif

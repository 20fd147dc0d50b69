/*
 * drain.h: waits for a whole context on drivers without cuCtxRecordEvent (before CUDA 12.5): a thread blocks in
 * cuCtxSynchronize, so that launching threads need not.
 *
 * Any thread may call these functions; the thread calls the driver with no lock held.
 */
#ifndef VGPU_DRAIN_H
#define VGPU_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

enum vgpu_drain_state { VGPU_DRAIN_BY_MARKERS, VGPU_DRAIN_BY_EVENT, VGPU_DRAIN_BY_THREAD };

/* The job of one context. Initially zero; the caller's memory until vgpu_drain_thread_forget. */
struct vgpu_drain_job {
    struct vgpu_drain_job *next;
    CUcontext context; /* NULL: the thread has no such job */
    uint64_t asked;
    uint64_t done;
};

/* Requests one synchronization of the context, which begins after this call. False: there is no thread for it. */
bool vgpu_drain_thread_ask(struct vgpu_drain_job *job, CUcontext context);

/* Has the last requested synchronization ended? */
bool vgpu_drain_thread_done(const struct vgpu_drain_job *job);

/* Called before the context ends. Returns when the thread is out of it; the job's memory may be freed then. */
void vgpu_drain_thread_forget(struct vgpu_drain_job *job);

#endif

/* drain.h: waiting for a whole context on drivers without cuCtxRecordEvent (before CUDA 12.5): a thread
 * that blocks in cuCtxSynchronize, so that no launching thread has to. */
#ifndef VGPU_DRAIN_H
#define VGPU_DRAIN_H

#include <stdbool.h>

#include "cuda_api.h"

#define VGPU_CONTEXTS_MAX 32u

enum vgpu_drain_state { VGPU_DRAIN_BY_MARKERS, VGPU_DRAIN_BY_EVENT, VGPU_DRAIN_BY_THREAD };

/* Asks for one synchronization of the context, begun after this call. */
void vgpu_drain_thread_ask(CUcontext context);

/* Has the one asked for last come to its end? */
bool vgpu_drain_thread_done(CUcontext context);

void vgpu_drain_thread_reset(void);

#endif

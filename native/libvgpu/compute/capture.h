/* capture.h: finds out which streams of this process are being captured. */
#ifndef VGPU_CAPTURE_H
#define VGPU_CAPTURE_H

#include <stdbool.h>

#include "cuda_api.h"

extern int vgpu_captures; /* number of captures that are in progress or beginning */

/* Returns whether any capture is in progress. During a capture, libvgpu avoids calls that would invalidate it. */
static inline bool vgpu_capture_any(void)
{
    return __builtin_expect(__atomic_load_n(&vgpu_captures, __ATOMIC_RELAXED) > 0, 0);
}

/*
 * Keeps captures from beginning, for a call that would invalidate each capture of a context. Returns false if a capture
 * is in progress or is beginning; otherwise vgpu_capture_allow() must follow. A thread that begins a capture meanwhile
 * waits, but for at most 1 s, because the call may wait for work that depends on that thread.
 */
bool vgpu_capture_forbid(void);
void vgpu_capture_allow(void);

/* Returns whether this stream is being captured; true also if the driver does not say. */
bool vgpu_capture_on(CUstream stream, int per_thread);

/* Forgets the captures on the streams of a context. Called when the context has ended. */
void vgpu_capture_forget(CUcontext context);

/*
 * Between vgpu_capture_relax and vgpu_capture_restore (with its result), driver calls of this thread invalidate no
 * capture, not even the thread's own.
 */
CUstreamCaptureMode vgpu_capture_relax(void);
void vgpu_capture_restore(CUstreamCaptureMode before);

/* As vgpu_capture_relax and _restore, but only if a capture is in progress; otherwise the cost is one load. */
#define VGPU_CAPTURE_UNCHANGED (-1) /* stands for a capture mode that was not changed */
static inline int vgpu_capture_relax_if_any(void)
{
    return vgpu_capture_any() ? (int)vgpu_capture_relax() : VGPU_CAPTURE_UNCHANGED;
}
static inline void vgpu_capture_restore_if_any(int before)
{
    if (__builtin_expect(before != VGPU_CAPTURE_UNCHANGED, 0))
        vgpu_capture_restore((CUstreamCaptureMode)before);
}

#endif

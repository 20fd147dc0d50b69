/* capture.h: the streams of this process that are being captured. */
#ifndef VGPU_CAPTURE_H
#define VGPU_CAPTURE_H

#include <stdbool.h>

#include "cuda_api.h"

/* Is any capture in progress? Calls that would invalidate one are avoided meanwhile. */
bool vgpu_capture_any(void);

/* Is this stream being captured? */
bool vgpu_capture_on(CUstream stream, int per_thread);

/* Called when the context has ended, and with it the captures on its streams. */
void vgpu_capture_forget(CUcontext context);

/* Between the two calls, driver calls of this thread invalidate no capture, including its own. */
CUstreamCaptureMode vgpu_capture_relax(void);
void vgpu_capture_restore(CUstreamCaptureMode before);

/* As above, but only if a capture is in progress; otherwise it costs one load. */
int vgpu_capture_relax_if_any(void);
void vgpu_capture_restore_if_any(int before);

#endif

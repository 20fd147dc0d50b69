/* capture.h: streams of this process that are being captured. */
#ifndef VGPU_CAPTURE_H
#define VGPU_CAPTURE_H

#include <stdbool.h>

#include "cuda_api.h"

/* Is any capture under way? Calls that would break one are avoided meanwhile. */
bool vgpu_capture_any(void);

/* Is this stream being captured? */
bool vgpu_capture_on(CUstream stream, int per_thread);

/* The context has ended, and the captures on its streams with it. */
void vgpu_capture_forget(CUcontext context);

/* Between the two, driver calls of this thread invalidate no capture, also none of its own. */
CUstreamCaptureMode vgpu_capture_relax(void);
void vgpu_capture_restore(CUstreamCaptureMode before);

/* The same at the cost of one load where no capture is under way. */
int vgpu_capture_relax_if_any(void);
void vgpu_capture_restore_if_any(int before);

#endif

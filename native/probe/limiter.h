/* limiter.h: is libvgpu in this process? A figure of a limit is worth nothing without. */
#ifndef PROBE_LIMITER_H
#define PROBE_LIMITER_H

#include <stdbool.h>

bool limiter_loaded(void);

#endif

/* limiter.h: finds out whether libvgpu is loaded in this process. Without it, measured limits are meaningless. */
#ifndef PROBE_LIMITER_H
#define PROBE_LIMITER_H

#include <stdbool.h>

bool limiter_loaded(void);

#endif

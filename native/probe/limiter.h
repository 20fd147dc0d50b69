/* limiter.h: is libvgpu loaded in this process? Measured limits are meaningless without it. */
#ifndef PROBE_LIMITER_H
#define PROBE_LIMITER_H

#include <stdbool.h>

bool limiter_loaded(void);

#endif

/*
 * wait.h: wrappers of calls that need nothing of libvgpu but to wait in front of the driver while the lease is
 * away (away.h). A thread that has been idle may begin with any of them; behind the driver's lock nobody sees it.
 */
#ifndef VGPU_WAIT_H
#define VGPU_WAIT_H

#include "away.h"
#include "functions.h"
#include "swap.h"

#define WAITS(symbol, parameters, ...)           \
    VGPU_EXPORT CUresult symbol parameters       \
    {                                            \
        vgpu_away_call();                        \
        return CALL_INSIDE(symbol, __VA_ARGS__); \
    }

/* And its twin for the per-thread default stream. */
#define WAITS_TWICE(symbol, parameters, ...) \
    WAITS(symbol, parameters, __VA_ARGS__)   \
    WAITS(symbol##_ptsz, parameters, __VA_ARGS__)

#endif

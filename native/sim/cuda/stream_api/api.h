/*
 * The files of this folder are compiled twice: as they stand, where stream 0 is the legacy default stream, and with
 * SIM_PER_THREAD, where the names end in _ptsz or _ptds and stream 0 is the thread's own.
 */
#ifndef VGPU_SIM_STREAM_API_H
#define VGPU_SIM_STREAM_API_H

#include "internal.h"

#ifdef SIM_PER_THREAD
#define PTSZ(name) name##_ptsz
#define PTDS(name) name##_ptds
#define DEFAULT_STREAM CU_STREAM_PER_THREAD
#else
#define PTSZ(name) name
#define PTDS(name) name
#define DEFAULT_STREAM CU_STREAM_LEGACY
#endif

static inline CUstream own(CUstream stream)
{
    return stream == NULL ? DEFAULT_STREAM : stream;
}

/* Enters a call whose work is ordered in a stream. */
static inline CUresult enter_stream(const char *function, CUstream stream, CUcontext *ctx)
{
    double position;
    CU_TRY(cu_enter(function));
    return cu_stream_resolve(own(stream), ctx, &position);
}

/* Enters a synchronous call, and waits until the earlier work of the default stream is done. */
static inline CUresult enter_sync(const char *function)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter_context(function, &ctx));
    CU_TRY(cu_stream_resolve(DEFAULT_STREAM, &ctx, &position));
    return cu_wait(ctx, position);
}

#endif

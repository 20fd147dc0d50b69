/*
 * Streams and events. All work of a process on a device is one queue (state/engine.c), so a stream is a position in the
 * queue: the position of the work that was submitted last to the stream.
 */
#include "green.h"

enum { OWN_STREAMS = 8 };

static bool is_default(CUstream stream)
{
    return stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* A thread's own default stream, in each of the contexts that the thread used most recently. */
struct own_stream {
    unsigned long long id; /* id of the context */
    double position;
};

static struct own_stream *own_of_thread(CUcontext ctx)
{
    static _Thread_local struct own_stream streams[OWN_STREAMS];
    static _Thread_local unsigned int next;
    for (int i = 0; i < OWN_STREAMS; i++)
        if (streams[i].id == ctx->id)
            return &streams[i];
    struct own_stream *own = &streams[next++ % OWN_STREAMS];
    /*
     * if the table has overflowed, an earlier entry of this context may be lost, and the stream gets the context's
     * position
     */
    *own = (struct own_stream){ctx->id, next > OWN_STREAMS ? ctx->position : 0};
    return own;
}

/*
 * Returns whether the stream's green context was destroyed. Then even the stream's destruction is refused (H200, driver
 * 580).
 */
static bool orphaned(CUstream stream)
{
    return stream->green != NULL && stream->green->magic != CU_GREEN;
}

static CUresult check_stream(CUstream stream)
{
    CU_CHECK(stream->magic == CU_STREAM, CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(!orphaned(stream), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return cu_owned(&stream->owner) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cu_stream_resolve(CUstream stream, CUcontext *ctx, double *position)
{
    *ctx = cu_current();
    if (is_default(stream)) {
        CU_CHECK(*ctx != NULL, CUDA_ERROR_INVALID_CONTEXT);
        CU_CHECK(cu_is_context(*ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
        bool legacy = stream != CU_STREAM_PER_THREAD;
        *position = legacy ? (*ctx)->position : own_of_thread(*ctx)->position;
        if (legacy && atomic_load_explicit(&cu_captures, memory_order_relaxed) > 0)
            return cu_capture_implicit(*ctx);
        return CUDA_SUCCESS;
    }
    CU_TRY(check_stream(stream));
    *ctx = stream->ctx;
    *position = stream->position;
    return CUDA_SUCCESS;
}

/*
 * Raises a position, and never lowers it: threads share contexts and may share streams, and another thread may have
 * raised it further.
 */
static void raise_position(_Atomic double *at, double position)
{
    double now = atomic_load_explicit(at, memory_order_relaxed);
    while (now < position && !atomic_compare_exchange_weak(at, &now, position))
        continue;
}

CUcontext cu_stream_view(CUstream stream, CUcontext ctx)
{
    if (is_default(stream))
        return cu_is_context(cu_view()) && cu_view()->base == ctx ? cu_view() : ctx;
    return stream->green != NULL ? stream->green->view : ctx;
}

void cu_stream_advance(CUstream stream, CUcontext ctx, double position)
{
    CUcontext view = cu_stream_view(stream, ctx);
    if (!is_default(stream))
        raise_position(&stream->position, position);
    else if (stream == CU_STREAM_PER_THREAD && own_of_thread(ctx)->position < position)
        own_of_thread(ctx)->position = position;
    raise_position(&ctx->position, position);
    if (view != ctx)
        raise_position(&view->position, position);
}

CUresult cu_wait(CUcontext ctx, double position)
{
    cu_mps_check();
    int broken = atomic_load_explicit(&cu.mps_fault, memory_order_relaxed);
    CU_CHECK(broken == 0, (CUresult)broken);
    struct sim_use *use = cu_device_of(ctx)->use;
    if (use != NULL && !cu_holds_wait(ctx, position))
        sim_engine_wait(cu.s, use, position);
    return cu_sim_device(ctx->ordinal)->lost ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

bool cu_reached(CUcontext ctx, double position)
{
    struct sim_use *use = cu_device_of(ctx)->use;
    return use == NULL || sim_engine_reached(cu.s, use, position, NULL);
}

CUresult cu_stream_make(CUcontext view, unsigned int flags, int priority, CUstream *out)
{
    CUstream s = calloc(1, sizeof(*s));
    CU_CHECK(s != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    cu_lock();
    *s = (struct CUstream_st){.magic = CU_STREAM,
                              .ctx = view->base,
                              .owner = cu_owner_of(view->base),
                              .green = view->green,
                              .flags = flags,
                              .priority = priority > 0    ? 0
                                          : priority < -5 ? -5
                                                          : priority,
                              .id = ++cu.next_id};
    cu_unlock();
    *out = s;
    return CUDA_SUCCESS;
}

static CUresult create(const char *function, CUstream *out, unsigned int flags, int priority)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context(function, &ctx));
    CU_CHECK(out != NULL && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    return cu_stream_make(cu_view(), flags, priority, out);
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags)
{
    return create("cuStreamCreate", out, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
    return create("cuStreamCreateWithPriority", out, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    CU_TRY(cu_enter("cuStreamDestroy_v2"));
    CU_CHECK(!is_default(stream), CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(check_stream(stream));
    cu_capture_leave_stream(stream);
    stream->magic = CU_DEAD;
    free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream)
{
    return cuStreamDestroy_v2(stream);
}

CUresult cu_check_event(CUevent event)
{
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_HANDLE);
    return cu_owned(&event->owner) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuEventCreate", &ctx));
    CU_CHECK(out != NULL && flags <= 7, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK((flags & CU_EVENT_INTERPROCESS) == 0 || (flags & CU_EVENT_DISABLE_TIMING) != 0, CUDA_ERROR_INVALID_VALUE);
    CUevent e = calloc(1, sizeof(*e));
    CU_CHECK(e != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    e->magic = CU_EVENT;
    e->ctx = ctx;
    e->owner = cu_owner_of(ctx);
    e->flags = flags;
    *out = e;
    return CUDA_SUCCESS;
}

static bool resolve(CUevent e)
{
    struct sim_use *use = cu_device_of(e->ctx)->use;
    uint64_t at = e->recorded_ns;
    if (e->resolved)
        return true;
    if (use != NULL && !sim_engine_reached(cu.s, use, e->position, &at))
        return false;
    e->at_ns = at > e->recorded_ns ? at : e->recorded_ns;
    e->resolved = true;
    return true;
}

/*
 * Stores the times of pending events whose work is done. The engine remembers only its latest rates, so this function
 * is called at the next record or synchronisation.
 */
void cu_pending_resolve(CUcontext ctx)
{
    uint32_t kept = 0;
    cu_lock();
    for (uint32_t i = 0; i < ctx->pending_count; i++)
        if (!resolve(ctx->pending[i]))
            ctx->pending[kept++] = ctx->pending[i];
    ctx->pending_count = kept;
    cu_unlock();
}

static void forget_pending(CUevent e)
{
    CUcontext ctx = e->ctx;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < ctx->pending_count; i++)
        if (ctx->pending[i] != e)
            ctx->pending[kept++] = ctx->pending[i];
    ctx->pending_count = kept;
}

void cu_pending_add(CUcontext ctx, CUevent e)
{
    cu_lock();
    bool full = ctx->pending_count == CU_PENDING_EVENTS;
    cu_unlock();
    if (full)
        cu_pending_resolve(ctx);
    cu_lock();
    forget_pending(e);
    if (ctx->pending_count < CU_PENDING_EVENTS)
        ctx->pending[ctx->pending_count++] = e;
    cu_unlock();
}

static CUresult record_at(CUevent event, CUcontext ctx, double position)
{
    CU_CHECK(event->ctx == ctx, CUDA_ERROR_INVALID_HANDLE);
    event->capture_id = 0;
    event->position = position;
    event->recorded_ns = sim_now_ns();
    event->recorded = true;
    event->resolved = false;
    cu_pending_add(ctx, event);
    if (event->shared != NULL)
        cu_shared_record(event);
    return CUDA_SUCCESS;
}

CUresult cu_event_record(CUevent event, CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    return record_at(event, ctx, position);
}

CUresult cu_context_record(CUcontext view, CUevent event)
{
    CU_TRY(cu_check_event(event));
    CU_TRY(cu_capture_whole(view));
    return record_at(event, view->base, view->position);
}

CUresult cu_context_wait(CUcontext view, CUevent event)
{
    CU_TRY(cu_check_event(event));
    CU_CHECK(!cu_capture_has(event), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CU_TRY(cu_capture_whole(view));
    if (event->shared != NULL && cu_shared_elsewhere(event))
        cu_shared_wait(event);
    else if (event->recorded && event->ctx == view->base)
        raise_position(&view->position, event->position);
    return CUDA_SUCCESS;
}

CUresult cuCtxRecordEvent(CUcontext ctx, CUevent event)
{
    CU_TRY(cu_enter("cuCtxRecordEvent"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return cu_context_record(ctx, event);
}

CUresult cuCtxWaitEvent(CUcontext ctx, CUevent event)
{
    CU_TRY(cu_enter("cuCtxWaitEvent"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return cu_context_wait(ctx, event);
}

CUresult cu_event_wait(CUevent event, CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    if (event->shared != NULL && cu_shared_elsewhere(event))
        cu_shared_wait(event);
    else if (event->recorded && event->ctx == ctx && event->position > position)
        cu_stream_advance(stream, ctx, event->position);
    return CUDA_SUCCESS;
}

static CUresult enter_event(const char *function, CUevent e)
{
    CU_TRY(cu_enter(function));
    return cu_check_event(e);
}

CUresult cuEventDestroy_v2(CUevent e)
{
    CU_TRY(enter_event("cuEventDestroy_v2", e));
    cu_lock();
    forget_pending(e);
    cu_capture_leave_event(e);
    cu_unlock();
    if (e->shared != NULL)
        cu_shared_leave(e);
    e->magic = CU_DEAD;
    free(e);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent e)
{
    return cuEventDestroy_v2(e);
}

CUresult cuEventQuery(CUevent e)
{
    CU_TRY(enter_event("cuEventQuery", e));
    CU_TRY(cu_capture_event(e));
    if (e->shared != NULL && cu_shared_elsewhere(e))
        return cu_shared_reached(e) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    return !e->recorded || resolve(e) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent e)
{
    CU_TRY(enter_event("cuEventSynchronize", e));
    CU_TRY(cu_capture_event(e));
    if (e->shared != NULL && cu_shared_elsewhere(e)) {
        cu_shared_wait(e);
        return CUDA_SUCCESS;
    }
    if (!e->recorded)
        return CUDA_SUCCESS;
    CU_TRY(cu_wait(e->ctx, e->position));
    resolve(e);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    CU_TRY(enter_event("cuEventElapsedTime_v2", start));
    CU_TRY(enter_event("cuEventElapsedTime_v2", end));
    CU_CHECK(milliseconds != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(start->recorded && end->recorded && ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0,
             CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(resolve(start) && resolve(end), CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((double)((int64_t)(end->at_ns - start->at_ns)) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

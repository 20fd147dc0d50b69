/*
 * Stream capture: calls on a capturing stream become nodes of a graph. A stream that waits for an event of a capture
 * joins that capture. A call that the CUDA programming guide forbids during a capture invalidates the capture.
 */
#include "graph.h"
#include "green.h"

static _Thread_local struct CUstream_st t_per_thread; /* capture state of CU_STREAM_PER_THREAD */

/*
 * Returns the stream object with the capture state of `stream`; NULL for the legacy stream, which cannot be captured.
 */
static CUstream state_of(CUstream stream)
{
    if (stream == NULL || stream == CU_STREAM_LEGACY)
        return NULL;
    return stream == CU_STREAM_PER_THREAD ? &t_per_thread : stream;
}

struct cu_capture *cu_capture_find(CUstream stream)
{
    if (atomic_load_explicit(&cu_captures, memory_order_relaxed) == 0)
        return NULL;
    CUstream state = state_of(stream);
    return state == NULL ? NULL : state->capture;
}

static struct cu_capture *by_id(unsigned long long id)
{
    struct cu_capture *c = cu_captures_list;
    while (c != NULL && c->id != id)
        c = c->next;
    return c;
}

CUresult cu_capture_set(CUstream stream, const CUgraphNode *nodes, size_t count, bool add)
{
    CUstream s = state_of(stream);
    size_t kept = add ? s->frontier_count : 0;
    CUgraphNode *list = realloc(s->frontier, (kept + count + 1) * sizeof(CUgraphNode));
    CU_CHECK(list != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    s->frontier = list;
    for (size_t i = 0; i < count; i++) {
        size_t j = 0;
        while (j < kept && list[j] != nodes[i])
            j++;
        list[j] = nodes[i];
        kept += j == kept;
    }
    s->frontier_count = kept;
    return CUDA_SUCCESS;
}

void cu_capture_list(CUstream stream, const CUgraphNode **nodes, size_t *count)
{
    const struct CUstream_st *s = state_of(stream);
    if (nodes != NULL)
        *nodes = s->frontier;
    if (count != NULL)
        *count = s->frontier_count;
}

void cu_capture_frontier(CUstream stream, CUgraphNode node)
{
    cu_capture_set(stream, &node, 1, false); /* cannot fail: glibc's smallest block has room */
}

static CUresult join(struct cu_capture *c, CUstream stream, const CUgraphNode *nodes, size_t count)
{
    CUstream s = state_of(stream);
    CUstream *more = realloc(c->streams, (c->stream_count + 1) * sizeof(CUstream));
    CU_CHECK(more != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    c->streams = more;
    CU_TRY(cu_capture_set(stream, nodes, count, false));
    c->streams[c->stream_count++] = s;
    s->capture = c;
    return CUDA_SUCCESS;
}

CUresult cu_capture_begin(CUstream stream, CUgraph graph, const CUgraphNode *before, size_t count,
                          CUstreamCaptureMode mode)
{
    CUstream s = state_of(stream);
    CU_CHECK(mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(s != NULL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CU_CHECK(s->capture == NULL, CUDA_ERROR_ILLEGAL_STATE);
    struct cu_capture *c = calloc(1, sizeof(*c));
    CU_CHECK(c != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    c->own_graph = graph == NULL;
    c->graph = graph == NULL ? cu_graph_new() : graph;
    c->mode = mode;
    c->origin = s;
    c->thread = pthread_self();
    c->id = ++cu.next_id;
    if (c->graph == NULL || join(c, stream, before, count) != CUDA_SUCCESS) {
        free(c);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    c->next = cu_captures_list;
    cu_captures_list = c;
    atomic_fetch_add(&cu_captures, 1);
    return CUDA_SUCCESS;
}

static bool reaches(CUgraphNode from, CUgraphNode to)
{
    if (from == to)
        return true;
    for (size_t i = 0; i < from->before_count; i++)
        if (reaches(from->before[i], to))
            return true;
    return false;
}

static bool is_joined(const struct cu_capture *c, CUstream other)
{
    for (size_t i = 0; i < other->frontier_count; i++) {
        bool found = false;
        for (size_t j = 0; j < c->origin->frontier_count && !found; j++)
            found = reaches(c->origin->frontier[j], other->frontier[i]);
        if (!found)
            return false;
    }
    return true;
}

static CUresult verdict(const struct cu_capture *c)
{
    if (c->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; i < c->stream_count; i++)
        if (!is_joined(c, c->streams[i]))
            return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    return CUDA_SUCCESS;
}

static void leave(CUstream s)
{
    s->capture = NULL;
    s->frontier_count = 0;
    free(s->frontier);
    s->frontier = NULL;
}

static void end(struct cu_capture *c)
{
    struct cu_capture **at = &cu_captures_list;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    for (size_t i = 0; i < c->stream_count; i++)
        leave(c->streams[i]);
    free(c->streams);
    free(c);
    atomic_fetch_sub(&cu_captures, 1);
}

CUresult cu_capture_end(CUstream stream, CUgraph *graph)
{
    struct cu_capture *c = cu_capture_find(stream);
    CU_CHECK(c != NULL, CUDA_ERROR_ILLEGAL_STATE);
    if (c->origin != state_of(stream)) {
        c->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    CU_CHECK(c->mode == CU_STREAM_CAPTURE_MODE_RELAXED || pthread_equal(c->thread, pthread_self()),
             CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CUresult result = verdict(c);
    if (result == CUDA_SUCCESS)
        *graph = c->graph;
    else if (c->own_graph)
        cu_graph_free(c->graph);
    end(c);
    return result;
}

CUresult cu_capture_add(CUstream stream, CUgraphNodeType type, CUgraphNode *out)
{
    cu_lock();
    struct cu_capture *c = cu_capture_find(stream);
    CUresult result = c == NULL ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (c != NULL && !c->invalid) {
        CUstream s = state_of(stream);
        result = cu_graph_add(c->graph, type, s->frontier, s->frontier_count, out);
        if (result == CUDA_SUCCESS)
            cu_capture_frontier(stream, *out);
    }
    cu_unlock();
    return result;
}

/*
 * Refuses a call that a capturing stream cannot record, and invalidates the capture. Returns CUDA_SUCCESS if the stream
 * is not capturing.
 */
CUresult cu_capture_refuse(CUstream stream)
{
    struct cu_capture *c = cu_capture_find(stream);
    if (c == NULL)
        return CUDA_SUCCESS;
    c->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/*
 * Invalidates the captures of the context's streams, or, without `all`, only of those streams that wait for the legacy
 * stream. For a green context, only its own streams count.
 */
static bool invalidate(CUcontext ctx, bool all)
{
    bool hit = false;
    if (atomic_load_explicit(&cu_captures, memory_order_relaxed) == 0)
        return false;
    cu_lock();
    for (struct cu_capture *c = cu_captures_list; c != NULL; c = c->next) {
        for (size_t i = 0; i < c->stream_count; i++) {
            const struct CUstream_st *s = c->streams[i];
            if (s->ctx != ctx->base || (ctx->green != NULL && s->green != ctx->green) ||
                (!all && (s->flags & CU_STREAM_NON_BLOCKING) != 0))
                continue;
            c->invalid = hit = true;
        }
    }
    cu_unlock();
    return hit;
}

/*
 * Invalidates the captures of all blocking streams of the context, because a use of the legacy stream waits for every
 * one of them.
 */
CUresult cu_capture_implicit(CUcontext ctx)
{
    return invalidate(ctx, false) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

void cu_capture_green(CUgreenCtx green)
{
    invalidate(green->view, true);
}

/*
 * Invalidates the captures of all of the context's streams: a wait for the context waits for each stream, in any
 * capture mode.
 */
CUresult cu_capture_whole(CUcontext ctx)
{
    return invalidate(ctx, true) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/*
 * Events in captures: recording an event stores the position of the stream, and a stream that waits for the event joins
 * the capture.
 */

static void forget_event(CUevent event)
{
    free(event->captured);
    event->captured = NULL;
    event->captured_count = 0;
    event->capture_id = 0;
}

CUresult cu_capture_record(CUevent event, CUstream stream)
{
    cu_lock();
    const struct cu_capture *c = cu_capture_find(stream);
    const struct CUstream_st *s = state_of(stream);
    CUresult result = c->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    forget_event(event);
    CUgraphNode *copy = calloc(s->frontier_count + 1, sizeof(*copy));
    if (result == CUDA_SUCCESS && copy != NULL) {
        for (size_t i = 0; i < s->frontier_count; i++)
            copy[i] = s->frontier[i];
        event->captured = copy;
        event->captured_count = s->frontier_count;
        event->capture_id = c->id;
    } else {
        free(copy);
    }
    cu_unlock();
    return result;
}

bool cu_capture_has(CUevent event)
{
    if (event->capture_id == 0)
        return false;
    cu_lock();
    bool lives = by_id(event->capture_id) != NULL;
    if (!lives)
        forget_event(event);
    cu_unlock();
    return lives;
}

/*
 * Refuses a call that needs the result of an event, if the event was recorded only in a capture. For any other event,
 * does what cu_capture_unsafe does.
 */
CUresult cu_capture_event(CUevent event)
{
    if (!cu_capture_has(event))
        return cu_capture_unsafe();
    cu_lock();
    struct cu_capture *c = by_id(event->capture_id);
    if (c != NULL)
        c->invalid = true;
    cu_unlock();
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult cu_capture_wait(CUstream stream, CUevent event)
{
    struct cu_capture *here = cu_capture_find(stream);
    bool captured = cu_capture_has(event);
    CUresult result;
    if (here != NULL && !captured) {
        here->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    CU_CHECK(state_of(stream) != NULL, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    cu_lock();
    struct cu_capture *c = by_id(event->capture_id);
    if (here != NULL && here != c) {
        here->invalid = c->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    } else if (here == c) {
        result = cu_capture_set(stream, event->captured, event->captured_count, true);
    } else {
        result = join(c, stream, event->captured, event->captured_count);
    }
    cu_unlock();
    return result;
}

void cu_capture_leave_event(CUevent event)
{
    forget_event(event);
}

/*
 * Called when a stream is destroyed: ends the capture that began on it, and invalidates another one that it has joined.
 */
void cu_capture_leave_stream(CUstream stream)
{
    cu_lock();
    struct cu_capture *c = cu_capture_find(stream);
    if (c != NULL && c->origin == stream) {
        if (c->own_graph)
            cu_graph_free(c->graph);
        end(c);
    } else if (c != NULL) {
        size_t kept = 0;
        for (size_t i = 0; i < c->stream_count; i++)
            if (c->streams[i] != stream)
                c->streams[kept++] = c->streams[i];
        c->stream_count = kept;
        c->invalid = true;
        leave(stream);
    }
    cu_unlock();
}

/* Ends the captures that began on the streams of a context that ends. */
static void end_of_context(CUcontext ctx)
{
    for (struct cu_capture *c = cu_captures_list, *next; c != NULL; c = next) {
        next = c->next;
        if (c->origin->ctx != ctx)
            continue;
        if (c->own_graph)
            cu_graph_free(c->graph);
        end(c);
    }
}
CU_AT_END(cu_context_end, cu_context_ends, end_of_context);

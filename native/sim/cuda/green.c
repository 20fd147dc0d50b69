/*
 * Green contexts. A green context is a set of SMs and a second name of the device's primary context: an object that is
 * made while it is current belongs to the primary context, and a stream also records its green context. A green context
 * takes the memory that the profile says; kernels take as long in it as elsewhere (docs/simulator.md).
 */
#include "green.h"

/* list of live green contexts; ended ones are never freed, because streams and threads may refer to them */
static CUgreenCtx g_greens;

static bool is_green(CUgreenCtx green)
{
    return green != NULL && green->magic == CU_GREEN;
}

static uint64_t cost(int ordinal)
{
    return cu_sim_device(ordinal)->green_context_bytes;
}

static CUresult make(CUdevResourceDesc desc, CUcontext primary, CUgreenCtx *out)
{
    CUgreenCtx green = calloc(1, sizeof(*green));
    CUcontext view = green == NULL ? NULL : cu_view_make(primary, green);
    if (view == NULL || cu_charge(desc->ordinal, SIM_GREEN, cost(desc->ordinal)) != CUDA_SUCCESS) {
        free(view);
        free(green);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *green = (struct CUgreenCtx_st){CU_GREEN, view, view->id, desc->sms, g_greens};
    g_greens = green;
    *out = green;
    return CUDA_SUCCESS;
}

static CUresult create(CUdevResourceDesc desc, CUgreenCtx *out)
{
    CUcontext primary;
    CU_TRY(cu_primary_retain(desc->ordinal, &primary));
    CUresult result = make(desc, primary, out);
    if (result != CUDA_SUCCESS)
        cu_primary_release(desc->ordinal);
    return result;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    CU_TRY(cu_enter_device("cuGreenCtxCreate", dev));
    CU_CHECK(out != NULL && desc != NULL && desc->magic == CU_DESCRIPTION && desc->ordinal == dev,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE); /* the flag was required until 13.0 */
    cu_lock();
    CUresult result = create(desc, out);
    cu_unlock();
    return result;
}

static void end(CUgreenCtx green)
{
    CUgreenCtx *at = &g_greens;
    while (*at != green)
        at = &(*at)->next;
    *at = green->next;
    cu_uncharge(green->view->ordinal, SIM_GREEN, cost(green->view->ordinal));
    green->view->magic = green->magic = CU_DEAD;
}

static void end_all(CUcontext primary)
{
    for (CUgreenCtx green = g_greens, next; green != NULL; green = next) {
        next = green->next;
        if (green->view->base == primary)
            end(green);
    }
}
CU_AT_END(cu_context_end, cu_context_ends, end_all);

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    CU_TRY(cu_enter("cuGreenCtxDestroy"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    int ordinal = green->view->ordinal;
    cu_capture_green(green);
    cu_lock();
    end(green);
    cu_primary_release(ordinal);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
    CU_TRY(cu_enter("cuCtxFromGreenCtx"));
    CU_CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    *ctx = green->view;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, CUdevResourceType type)
{
    CU_TRY(cu_enter("cuGreenCtxGetDevResource"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    return cu_resource_of(green->view->ordinal, &green->sms, resource, type);
}

CUresult cuCtxGetDevResource(CUcontext ctx, CUdevResource *resource, CUdevResourceType type)
{
    CU_TRY(cu_enter("cuCtxGetDevResource"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return cu_resource_of(ctx->ordinal, ctx->green != NULL ? &ctx->green->sms : NULL, resource, type);
}

CUresult cuGreenCtxGetId(CUgreenCtx green, unsigned long long *id)
{
    CU_TRY(cu_enter("cuGreenCtxGetId"));
    if (green == NULL && cu_is_context(cu_view()))
        green = cu_view()->green;
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(id != NULL, CUDA_ERROR_INVALID_VALUE);
    *id = green->id;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority)
{
    CU_TRY(cu_enter("cuGreenCtxStreamCreate"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(stream != NULL && flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    return cu_stream_make(green->view, flags, priority, stream);
}

CUresult cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event)
{
    CU_TRY(cu_enter("cuGreenCtxRecordEvent"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    return cu_context_record(green->view, event);
}

CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event)
{
    CU_TRY(cu_enter("cuGreenCtxWaitEvent"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    return cu_context_wait(green->view, event);
}

CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_enter("cuStreamGetGreenCtx"));
    CU_CHECK(green != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    *green = cu_stream_view(stream, ctx)->green;
    return CUDA_SUCCESS;
}

/* Green contexts. One is a set of SMs and a second name of the device's primary context: whatever is made
 * while it is current belongs to the primary context, and its streams know that they are its own. Kernels
 * take as long in it as elsewhere (docs/simulator.md). */
#include "green.h"

static CUgreenCtx g_greens; /* freed ones are kept for reuse, as contexts are */

static bool is_green(CUgreenCtx green)
{
    return green != NULL && green->magic == CU_GREEN;
}

static CUgreenCtx new_green(void)
{
    CUgreenCtx green = g_greens;
    while (green != NULL && green->magic != CU_DEAD)
        green = green->next;
    if (green == NULL && (green = calloc(1, sizeof(*green))) != NULL) {
        green->next = g_greens;
        g_greens = green;
    }
    return green;
}

static CUresult create(CUdevResourceDesc desc, CUgreenCtx *out)
{
    CUcontext primary;
    CUgreenCtx green = new_green();
    CU_CHECK(green != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CU_TRY(cu_primary_retain(desc->ordinal, &primary));
    green->view = cu_view_make(primary, green);
    if (green->view == NULL) {
        cu_primary_release(desc->ordinal);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    green->id = green->view->id;
    green->sms = desc->sms;
    green->magic = CU_GREEN;
    *out = green;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    CU_TRY(cu_enter_device("cuGreenCtxCreate", dev));
    CU_CHECK(out != NULL && desc != NULL && desc->magic == CU_DESCRIPTION && desc->ordinal == dev,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE); /* required until 13.0 */
    cu_lock();
    CUresult result = create(desc, out);
    cu_unlock();
    return result;
}

void cu_green_end(CUgreenCtx green)
{
    green->view->magic = CU_DEAD;
    green->magic = CU_DEAD;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    CU_TRY(cu_enter("cuGreenCtxDestroy"));
    CU_CHECK(is_green(green), CUDA_ERROR_INVALID_CONTEXT);
    int ordinal = green->view->ordinal;
    cu_capture_green(green);
    cu_lock();
    cu_green_end(green);
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

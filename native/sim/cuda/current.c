/* The contexts that exist, and the current context of each thread: the top of its stack. */
#include "internal.h"

#define STACK_DEPTH 64

static _Thread_local CUcontext t_stack[STACK_DEPTH];
static _Thread_local int t_depth;

bool cu_is_context(CUcontext ctx)
{
    return ctx != NULL && ctx->magic == CU_CONTEXT;
}

struct cu_owner cu_owner_of(CUcontext ctx)
{
    return (struct cu_owner){ctx, ctx->id};
}

bool cu_owned(const struct cu_owner *owner)
{
    return cu_is_context(owner->ctx) && owner->ctx->id == owner->id;
}

CUcontext cu_view(void)
{
    return t_depth > 0 ? t_stack[t_depth - 1] : NULL;
}

CUcontext cu_current(void)
{
    CUcontext view = cu_view();
    return cu_is_context(view) ? view->base : view;
}

struct cu_device *cu_device_of(CUcontext ctx)
{
    return &cu.devices[ctx->ordinal];
}

CUresult cu_push(CUcontext ctx)
{
    CU_CHECK(t_depth < STACK_DEPTH, CUDA_ERROR_INVALID_CONTEXT);
    t_stack[t_depth++] = ctx;
    return CUDA_SUCCESS;
}

CUresult cu_pop(CUcontext *ctx)
{
    CU_CHECK(t_depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    t_depth--;
    if (ctx != NULL)
        *ctx = t_stack[t_depth];
    return CUDA_SUCCESS;
}

CUresult cu_find_context(CUcontext *ctx)
{
    *ctx = cu_current();
    CU_CHECK(*ctx != NULL, CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(cu_is_context(*ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return cu_sim_device((*ctx)->ordinal)->lost ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

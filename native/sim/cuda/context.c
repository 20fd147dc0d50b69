/* CUDA contexts: primary contexts, contexts made by the program, each thread's stack of contexts, and limits. */
#include "internal.h"

CU_ENDS(cu_context_end, cu_context_ends);

static struct CUctx_st *g_all[1024];

/*
 * Returns true if this process may use the device. The mode EXCLUSIVE_PROCESS lets one process in, or all clients of
 * one MPS server.
 */
static bool may_enter(const struct cu_device *d)
{
    uint32_t mode = cu.s->devices[d->device].compute_mode;
    if (mode == CU_COMPUTEMODE_DEFAULT)
        return true;
    if (mode == CU_COMPUTEMODE_PROHIBITED)
        return false;
    sim_sweep(cu.s);
    uint32_t high = atomic_load(&cu.s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_proc *p = &cu.s->procs[i];
        for (uint32_t j = 0; sim_proc_holds(p) && p != cu.proc && j < SIM_MAX_USES && p->uses[j].used; j++) {
            const struct sim_use *u = &p->uses[j];
            if (u->used && u->contexts > 0 && u->device == d->device && u->gi == d->gi && !(u->mps && cu.mps))
                return false;
        }
    }
    return true;
}

static CUresult claim_use(struct cu_device *d)
{
    if (!may_enter(d))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (d->use != NULL)
        return CUDA_SUCCESS;
    struct sim_use *use = sim_use_get(cu.proc, d->device, d->gi, d->ci);
    CU_CHECK(use != NULL, CUDA_ERROR_DEVICE_UNAVAILABLE);
    use->mps = cu.mps;
    use->mps_fraction = cu.mps_fraction;
    d->use = use;
    return CUDA_SUCCESS;
}

static uint64_t context_cost(const struct cu_device *d)
{
    const struct sim_device *card = &cu.s->devices[d->device];
    return cu.mps ? card->context_mps_bytes : card->context_bytes;
}

static CUcontext new_context(void)
{
    for (size_t i = 0; i < sizeof(g_all) / sizeof(g_all[0]); i++) {
        if (g_all[i] == NULL)
            g_all[i] = calloc(1, sizeof(*g_all[i]));
        if (g_all[i] == NULL)
            return NULL;
        if (g_all[i]->magic == CU_DEAD)
            return g_all[i];
    }
    return NULL;
}

static CUresult create(CUdevice dev, unsigned int flags, bool primary, CUcontext *out)
{
    struct cu_device *d = &cu.devices[dev];
    CU_CHECK(!cu_sim_device(dev)->lost, CUDA_ERROR_UNKNOWN);
    if (d->gi != SIM_NONE && !cu_sim_device(dev)->gis[d->gi].cis[d->ci].used)
        return CUDA_ERROR_DEVICE_UNAVAILABLE; /* the MIG compute instance was destroyed after cuInit */
    cu_sim_lock();
    CUresult result = claim_use(d);
    sim_unlock(cu.s);
    CU_TRY(result);
    CUcontext ctx = new_context();
    CU_CHECK(ctx != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CU_TRY(cu_charge(dev, SIM_CONTEXT, context_cost(d)));
    memset(ctx, 0, sizeof(*ctx));
    ctx->ordinal = dev;
    result = cu_channels_make(ctx);
    if (result != CUDA_SUCCESS) {
        cu_uncharge(dev, SIM_CONTEXT, context_cost(d));
        return result;
    }
    atomic_fetch_add_explicit(&d->use->contexts, 1, memory_order_release);
    ctx->flags = flags;
    ctx->primary = primary;
    ctx->id = ++cu.next_id;
    ctx->limits[CU_LIMIT_STACK_SIZE] = 1024;
    ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 7340032;
    ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8388608;
    ctx->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    ctx->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    ctx->base = ctx;
    ctx->magic = CU_CONTEXT;
    *out = ctx;
    return CUDA_SUCCESS;
}

CUcontext cu_view_make(CUcontext primary, CUgreenCtx green)
{
    CUcontext ctx = calloc(1, sizeof(*ctx));
    if (ctx == NULL)
        return NULL;
    ctx->ordinal = primary->ordinal;
    ctx->flags = primary->flags;
    ctx->id = ++cu.next_id;
    ctx->base = primary;
    ctx->green = green;
    ctx->magic = CU_CONTEXT;
    return ctx;
}

static void destroy(CUcontext ctx)
{
    struct cu_device *d = cu_device_of(ctx);
    CU_EACH_END(cu_context_ends, ctx);
    ctx->magic = CU_DEAD;
    cu_channels_end(ctx);
    atomic_fetch_sub_explicit(&d->use->contexts, 1, memory_order_release);
    cu_uncharge(ctx->ordinal, SIM_CONTEXT, context_cost(d));
}

CUresult cu_primary_retain(CUdevice dev, CUcontext *ctx)
{
    struct cu_device *d = &cu.devices[dev];
    if (d->primary == NULL)
        CU_TRY(create(dev, d->primary_flags, true, &d->primary));
    d->primary_refs++;
    *ctx = d->primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDevicePrimaryCtxRetain", dev));
    CU_CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_primary_retain(dev, ctx);
    cu_unlock();
    return result;
}

static CUresult release_primary(CUdevice dev, bool all)
{
    struct cu_device *d = &cu.devices[dev];
    if (d->primary == NULL)
        return all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (!all && --d->primary_refs > 0)
        return CUDA_SUCCESS;
    destroy(d->primary);
    if (!all)
        d->primary_refs = 0;
    d->primary = NULL;
    return CUDA_SUCCESS;
}

void cu_primary_release(CUdevice dev)
{
    release_primary(dev, false);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDevicePrimaryCtxRelease_v2", dev));
    cu_lock();
    CUresult result = release_primary(dev, false);
    cu_unlock();
    return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    return cuDevicePrimaryCtxRelease_v2(dev);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDevicePrimaryCtxReset_v2", dev));
    cu_lock();
    CUresult result = release_primary(dev, true);
    cu_unlock();
    return result;
}

CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
    return cuDevicePrimaryCtxReset_v2(dev);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    CU_TRY(cu_enter_device("cuDevicePrimaryCtxSetFlags_v2", dev));
    cu.devices[dev].primary_flags = flags;
    if (cu.devices[dev].primary != NULL)
        cu.devices[dev].primary->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
    return cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    CU_TRY(cu_enter_device("cuDevicePrimaryCtxGetState", dev));
    if (flags != NULL)
        *flags = cu.devices[dev].primary_flags;
    if (active != NULL)
        *active = cu.devices[dev].primary != NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuCtxCreate_v2", dev));
    CU_CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = create(dev, flags, false, ctx);
    cu_unlock();
    CU_TRY(result);
    return cu_push(*ctx);
}

CUresult cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
    return cuCtxCreate_v2(ctx, flags, dev);
}

CUresult cuCtxCreate_v3(CUcontext *ctx, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice dev)
{
    CU_CHECK(affinity == NULL || count == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return cuCtxCreate_v2(ctx, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
    CU_CHECK(params == NULL || params->numExecAffinityParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return cuCtxCreate_v2(ctx, flags, dev);
}

CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    CU_TRY(cu_enter("cuCtxDestroy_v2"));
    CU_CHECK(cu_is_context(ctx) && !ctx->primary && ctx->green == NULL, CUDA_ERROR_INVALID_CONTEXT);
    if (cu_current() == ctx)
        cu_pop(NULL);
    cu_lock();
    destroy(ctx);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext ctx)
{
    return cuCtxDestroy_v2(ctx);
}

CUresult cuCtxAttach(CUcontext *ctx, unsigned int flags)
{
    CU_TRY(cu_enter("cuCtxAttach"));
    CU_CHECK(ctx != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CUcontext current = cu_current();
    CU_CHECK(current != NULL && !current->primary && current->green == NULL, CUDA_ERROR_INVALID_CONTEXT);
    cu_lock();
    current->attached++;
    cu_unlock();
    *ctx = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext ctx)
{
    CU_TRY(cu_enter("cuCtxDetach"));
    CU_CHECK(ctx != NULL && cu_current() == ctx, CUDA_ERROR_INVALID_CONTEXT);
    cu_lock();
    bool last = ctx->attached == 0;
    ctx->attached -= last ? 0 : 1;
    cu_unlock();
    return last ? cuCtxDestroy_v2(ctx) : CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    CU_TRY(cu_enter("cuCtxPushCurrent_v2"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return cu_push(ctx);
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
    CU_TRY(cu_enter("cuCtxPopCurrent_v2"));
    return cu_pop(ctx);
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
    CU_TRY(cu_enter_suspended("cuCtxSetCurrent"));
    CU_CHECK(ctx == NULL || cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    (void)cu_pop(NULL);
    return ctx == NULL ? CUDA_SUCCESS : cu_push(ctx);
}

CUresult cuCtxGetCurrent(CUcontext *ctx)
{
    CU_TRY(cu_enter_suspended("cuCtxGetCurrent"));
    CU_CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctx = cu_view();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *dev)
{
    CUcontext ctx;
    CU_TRY(cu_enter_suspended("cuCtxGetDevice"));
    CU_TRY(cu_find_context(&ctx));
    CU_CHECK(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    *dev = ctx->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *dev, CUcontext ctx)
{
    if (ctx == NULL)
        return cuCtxGetDevice(dev);
    CU_TRY(cu_enter("cuCtxGetDevice_v2"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    *dev = ctx->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxGetFlags", &ctx));
    CU_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    CU_TRY(cu_enter("cuCtxGetId"));
    if (ctx == NULL)
        ctx = cu_view();
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(id != NULL, CUDA_ERROR_INVALID_VALUE);
    *id = ctx->id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    CU_TRY(cu_enter("cuCtxGetApiVersion"));
    if (ctx == NULL)
        ctx = cu_current();
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CU_CHECK(version != NULL, CUDA_ERROR_INVALID_VALUE);
    *version = 3020;
    return CUDA_SUCCESS;
}

static CUresult synchronize(CUcontext view)
{
    CU_TRY(cu_capture_whole(view));
    CU_TRY(cu_capture_unsafe());
    CU_TRY(cu_wait(view->base, view->position));
    cu_pending_resolve(view->base);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxSynchronize", &ctx));
    return synchronize(cu_view());
}

CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
    if (ctx == NULL)
        return cuCtxSynchronize();
    CU_TRY(cu_enter("cuCtxSynchronize_v2"));
    CU_CHECK(cu_is_context(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return synchronize(ctx);
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxSetLimit", &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(limit < CU_LIMIT_MAX, CUDA_ERROR_INVALID_VALUE);
    ctx->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxGetLimit", &ctx));
    CU_CHECK(value != NULL && limit < CU_LIMIT_MAX, CUDA_ERROR_INVALID_VALUE);
    *value = ctx->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxGetStreamPriorityRange", &ctx));
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxEnablePeerAccess", &ctx));
    CU_CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(cu_is_context(peer), CUDA_ERROR_INVALID_CONTEXT);
    int can = 0;
    CU_TRY(cuDeviceCanAccessPeer(&can, ctx->ordinal, peer->ordinal));
    return can ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuCtxDisablePeerAccess", &ctx));
    return cu_is_context(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

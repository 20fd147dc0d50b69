/*
 * context.c: contexts take device memory that no call names (about 520 MiB on an H200). What NVML says
 * the process holds beyond what it asked for, just after a context came to be, is charged as context
 * bytes. Where NVML cannot say (a missing library, a figure it does not have), nothing is charged.
 *
 * Before the driver is entered, the largest figure that a process of this lease has learnt is reserved,
 * so that a second process's context does not pass the limit even for the moment until it is measured.
 */
#include <pthread.h>
#include <string.h>

#include "charge.h"
#include "context.h"
#include "device.h"
#include "functions.h"
#include "process_memory.h"
#include "tenant.h"

struct device_contexts {
    uint32_t live;        /* contexts of this process on the device, the primary one included */
    uint32_t primary_refs;
    CUcontext primary;    /* NULL while it is not active */
};

static struct device_contexts contexts[VGPU_MAX_DEVICES];
static pthread_mutex_t creation = PTHREAD_MUTEX_INITIALIZER; /* one measurement at a time */

void vgpu_context_reset(void)
{
    memset(contexts, 0, sizeof(contexts));
    pthread_mutex_init(&creation, NULL);
}

static uint64_t learnt(unsigned device)
{
    const struct vgpu_usage *usage = vgpu_tenant_account()->usage;
    uint64_t most = 0;
    for (uint32_t i = 0; i < VGPU_MAX_SLOTS; i++) {
        uint64_t bytes = __atomic_load_n(&usage->slots[i].devices[device].context_bytes, __ATOMIC_RELAXED);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* What this process has been charged on the device, contexts included. */
static uint64_t charged(unsigned device)
{
    const struct vgpu_account *account = vgpu_tenant_account();
    const struct vgpu_slot_device *own = &account->usage->slots[account->slot].devices[device];
    return __atomic_load_n(&own->used_bytes, __ATOMIC_SEQ_CST) +
           __atomic_load_n(&own->context_bytes, __ATOMIC_SEQ_CST);
}

/* Reserves for one more context. Called with `creation` held. */
static CUresult begin(struct vgpu_charge *charge, CUdevice device)
{
    CUresult result = vgpu_charge_device(charge, device, 0);
    if (result != CUDA_SUCCESS || !charge->active)
        return result;
    if (contexts[charge->device].live == 0 && !vgpu_charge_resize(charge, learnt((unsigned)charge->device))) {
        vgpu_charge_undo(charge, CUDA_SUCCESS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Settles for what the new context really takes; false: that passes the limit, so it must go again. */
static bool measure(struct vgpu_charge *charge)
{
    unsigned device = (unsigned)charge->device;
    uint64_t held;
    if (vgpu_process_memory(vgpu_tenant_uuid(device), &held)) {
        uint64_t before = charged(device) - charge->bytes;
        if (!vgpu_charge_resize(charge, held > before ? held - before : 0))
            return false;
    }
    vgpu_account_to_context(vgpu_tenant_account(), device, charge->bytes);
    return true;
}

static void ended(int device, CUcontext context)
{
    vgpu_charge_end_context(context);
    if (contexts[device].live > 0)
        contexts[device].live--;
    if (contexts[device].live == 0)
        vgpu_account_drop_context(vgpu_tenant_account(), (unsigned)device);
}

/* After the driver's answer to a context's creation. Called with `creation` held. */
static CUresult finish(struct vgpu_charge *charge, CUresult result, const CUcontext *context)
{
    if (!charge->active)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_charge_undo(charge, result);
        return result;
    }
    if (!measure(charge)) {
        CALL(cuCtxDestroy_v2, *context);
        vgpu_charge_undo(charge, CUDA_SUCCESS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    contexts[charge->device].live++;
    return result;
}

#define CREATE_BODY(symbol, ...)                     \
    do {                                             \
        struct vgpu_charge charge;                   \
        pthread_mutex_lock(&creation);               \
        CUresult result = begin(&charge, dev);       \
        if (result == CUDA_SUCCESS)                  \
            result = finish(&charge, CALL(symbol, __VA_ARGS__), pctx); \
        pthread_mutex_unlock(&creation);             \
        return result;                               \
    } while (0)

VGPU_EXPORT CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    CREATE_BODY(cuCtxCreate, pctx, flags, dev);
}

VGPU_EXPORT CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    CREATE_BODY(cuCtxCreate_v2, pctx, flags, dev);
}

VGPU_EXPORT CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams,
                                    unsigned int flags, CUdevice dev)
{
    CREATE_BODY(cuCtxCreate_v3, pctx, paramsArray, numParams, flags, dev);
}

VGPU_EXPORT CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
    CREATE_BODY(cuCtxCreate_v4, pctx, ctxCreateParams, flags, dev);
}

/* The device must be asked for before the context is gone. */
static int index_of(CUcontext context)
{
    bool limited;
    CUdevice device;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited ||
        vgpu_device_of_context(context, &device) != CUDA_SUCCESS)
        return VGPU_NOT_IN_LEASE;
    return vgpu_device_index(device);
}

#define DESTROY_BODY(symbol)                              \
    do {                                                  \
        pthread_mutex_lock(&creation);                    \
        int device = ctx != NULL ? index_of(ctx) : VGPU_NOT_IN_LEASE; \
        CUresult result = CALL(symbol, ctx);              \
        if (result == CUDA_SUCCESS && device != VGPU_NOT_IN_LEASE) \
            ended(device, ctx);                           \
        pthread_mutex_unlock(&creation);                  \
        return result;                                    \
    } while (0)

VGPU_EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
    DESTROY_BODY(cuCtxDestroy);
}

VGPU_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    DESTROY_BODY(cuCtxDestroy_v2);
}

/* One more reference to a primary context that is there already costs nothing. */
static CUresult retain_more(struct device_contexts *known, CUcontext *pctx, CUdevice dev)
{
    CUresult result = CALL(cuDevicePrimaryCtxRetain, pctx, dev);
    if (result == CUDA_SUCCESS)
        known->primary_refs++;
    return result;
}

static CUresult retain_first(struct vgpu_charge *charge, CUcontext *pctx, CUdevice dev)
{
    CUresult result = CALL(cuDevicePrimaryCtxRetain, pctx, dev);
    if (!charge->active)
        return result;
    if (result != CUDA_SUCCESS || !measure(charge)) {
        if (result == CUDA_SUCCESS)
            CALL(cuDevicePrimaryCtxRelease_v2, dev);
        vgpu_charge_undo(charge, result);
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct device_contexts *known = &contexts[charge->device];
    known->live++;
    known->primary = *pctx;
    known->primary_refs++;
    return CUDA_SUCCESS;
}

VGPU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    struct vgpu_charge charge;
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&creation);
    int device = limited ? vgpu_device_index(dev) : VGPU_NOT_IN_LEASE;
    if (device != VGPU_NOT_IN_LEASE && contexts[device].primary != NULL) {
        result = retain_more(&contexts[device], pctx, dev);
    } else {
        result = begin(&charge, dev);
        if (result == CUDA_SUCCESS)
            result = retain_first(&charge, pctx, dev);
    }
    pthread_mutex_unlock(&creation);
    return result;
}

/* The primary context of a limited device, or NULL. Called with `creation` held. */
static struct device_contexts *primary_of(CUdevice dev, int *index)
{
    bool limited;
    *index = vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited ? vgpu_device_index(dev) : VGPU_NOT_IN_LEASE;
    if (*index == VGPU_NOT_IN_LEASE || contexts[*index].primary == NULL)
        return NULL;
    return &contexts[*index];
}

static void primary_ended(struct device_contexts *known, int index)
{
    ended(index, known->primary);
    known->primary = NULL;
}

#define RELEASE_BODY(symbol)                                        \
    do {                                                            \
        int index;                                                  \
        pthread_mutex_lock(&creation);                              \
        struct device_contexts *known = primary_of(dev, &index);    \
        CUresult result = CALL(symbol, dev);                        \
        if (result == CUDA_SUCCESS && known != NULL && known->primary_refs > 0 && --known->primary_refs == 0) \
            primary_ended(known, index);                            \
        pthread_mutex_unlock(&creation);                            \
        return result;                                              \
    } while (0)

#define RESET_BODY(symbol)                                          \
    do {                                                            \
        int index;                                                  \
        pthread_mutex_lock(&creation);                              \
        struct device_contexts *known = primary_of(dev, &index);    \
        CUresult result = CALL(symbol, dev);                        \
        if (result == CUDA_SUCCESS && known != NULL)                \
            primary_ended(known, index);                            \
        pthread_mutex_unlock(&creation);                            \
        return result;                                              \
    } while (0)

VGPU_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    RELEASE_BODY(cuDevicePrimaryCtxRelease);
}

VGPU_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    RELEASE_BODY(cuDevicePrimaryCtxRelease_v2);
}

VGPU_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
    RESET_BODY(cuDevicePrimaryCtxReset);
}

VGPU_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    RESET_BODY(cuDevicePrimaryCtxReset_v2);
}

/*
 * context.c: contexts take device memory that no call requests explicitly (518 MiB on an H200). The difference between
 * NVML's figure and the process's own allocations, right after a context was made, is charged as context bytes.
 *
 * Before the driver's call, the size of an earlier context of this lease is claimed. While no size is known, contexts
 * are made one after another, so that at most one context exceeds the limit, and it is destroyed again.
 */
#include <pthread.h>
#include <string.h>

#include "suspended.h"
#include "capture.h"
#include "charge.h"
#include "context.h"
#include "device.h"
#include "functions.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "evictable.h"
#include "in_flight.h"
#include "module.h"
#include "primary.h"
#include "process_memory.h"
#include "source.h"
#include "swap.h"
#include "tenant.h"
#include "thread.h"

struct device_contexts {
    uint32_t live; /* number of this process's contexts on the device, including the primary one */
    uint32_t primary_refs;
    CUcontext primary; /* the primary context; NULL while it is not active */
};

static struct device_contexts contexts[VGPU_MAX_DEVICES];
/* held during the creation of a context, so that only one is measured at a time */
static pthread_mutex_t creation = PTHREAD_MUTEX_INITIALIZER;

/*
 * Begins the creation of a context. The thread cannot be cancelled until creation_ends: a cancelled thread would keep
 * `creation`, or a lock of the driver.
 */
static int creation_begins(void)
{
    int cancels = vgpu_thread_keep();
    pthread_mutex_lock(&creation);
    return cancels;
}

static void creation_ends(int cancels)
{
    pthread_mutex_unlock(&creation);
    vgpu_thread_release(cancels);
}

static void reset(void)
{
    memset(contexts, 0, sizeof(contexts));
    pthread_mutex_init(&creation, NULL);
}
VGPU_IN_CHILD(reset);

/*
 * Returns the size of a context on the device in bytes, as a process of this lease measured it; 0 if none was measured
 * yet.
 */
static uint64_t learnt(unsigned device)
{
    return (uint64_t)__atomic_load_n(&vgpu_tenant_account()->usage->context_mib[device], __ATOMIC_RELAXED) << 20;
}

static void note_learnt(unsigned device, uint64_t bytes)
{
    uint64_t mib = (bytes + (1u << 20) - 1) >> 20;
    if (bytes > 0 && mib <= UINT32_MAX)
        __atomic_store_n(&vgpu_tenant_account()->usage->context_mib[device], (uint32_t)mib, __ATOMIC_RELAXED);
}

static uint64_t context_bytes(unsigned device)
{
    const struct vgpu_account *account = vgpu_tenant_account();
    return __atomic_load_n(&account->usage->slots[account->slot].devices[device].context_bytes, __ATOMIC_SEQ_CST);
}

/*
 * State of a call of the driver that may end a context. The driver must not end a context while the swap thread makes
 * calls in it.
 */
struct ending {
    int cancels;
    bool inside;
};

static struct ending ending_begins(void)
{
    int cancels = creation_begins();
    return (struct ending){.cancels = cancels, .inside = vgpu_swap_ending_begins()};
}

static void ending_ends(struct ending ending)
{
    vgpu_swap_ending_ends(ending.inside);
    creation_ends(ending.cancels);
}

/* One context that is about to be made. */
struct creation {
    struct vgpu_charge charge;
    uint64_t before; /* context bytes of this process before the creation */
    bool alone;      /* the process holds the lease's lock, because no context was measured yet */
};

/*
 * Returns the error for a device outside the lease: the driver's own error if it has one (not initialised, as in a
 * forked child; no such device), otherwise CUDA_ERROR_NOT_PERMITTED.
 */
static CUresult not_in_lease(CUdevice device)
{
    int count = 0;
    CUresult result = CALL(cuDeviceGetCount, &count);
    if (result != CUDA_SUCCESS)
        return result;
    if (device < 0 || device >= count)
        return CUDA_ERROR_INVALID_DEVICE;
    vgpu_device_tell_foreign(device);
    return CUDA_ERROR_NOT_PERMITTED;
}

/* Claims memory for one more context. Precondition: the lock `creation` is held. */
static CUresult begin(struct creation *made, CUdevice device)
{
    bool limited;
    *made = (struct creation){.charge.active = false};
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS || !limited)
        return result;
    int index = vgpu_device_index(device);
    if (index == VGPU_NOT_IN_LEASE)
        return not_in_lease(device);
    if (learnt((unsigned)index) == 0) {
        /* NVML starts on another thread meanwhile; the driver takes longer to make the context */
        vgpu_process_memory_warm();
        made->alone = vgpu_tenant_lock_contexts();
    }
    result = vgpu_charge_index(&made->charge, index, learnt((unsigned)index));
    made->before = context_bytes((unsigned)index);
    if (result != CUDA_SUCCESS && made->alone)
        vgpu_tenant_unlock_contexts();
    return result;
}

/*
 * Settles the claim with the actual size of the new context. Returns false if the context exceeds the limit, so that it
 * must be destroyed. The known size is used until NVML has started, which takes some milliseconds, or if NVML has no
 * figure.
 */
static bool measure(struct creation *made)
{
    struct vgpu_charge *charge = &made->charge;
    unsigned device = (unsigned)charge->device;
    bool wait = charge->bytes == 0 || vgpu_process_memory_ready();
    if (wait && vgpu_overhead_look(charge->device, charge->bytes)) {
        note_learnt(device, context_bytes(device) > made->before ? context_bytes(device) - made->before : 0);
    } else {
        vgpu_account_set_context(vgpu_tenant_account(), device, context_bytes(device) + charge->bytes);
        vgpu_process_memory_warm();
        vgpu_overhead_later((int)device);
    }
    vgpu_charge_undo(charge, CUDA_SUCCESS);
    return vgpu_overhead_within_limit((int)device);
}

static void done(const struct creation *made)
{
    if (made->alone)
        vgpu_tenant_unlock_contexts();
}

static void ended(int device, CUcontext context)
{
    vgpu_capture_forget(context);
    vgpu_module_forget();
    vgpu_charge_end_context(context);
    vgpu_evictable_end_context(context);
    if (contexts[device].live > 0)
        contexts[device].live--;
    vgpu_sources_settle(device);
    if (contexts[device].live == 0)
        vgpu_account_set_context(vgpu_tenant_account(), (unsigned)device, 0);
    vgpu_overhead_changed();
    vgpu_overhead_later(device);
}

/* Handles the driver's result of a context's creation. Precondition: the lock `creation` is held. */
static CUresult finish(struct creation *made, CUresult result, const CUcontext *context)
{
    int device = made->charge.device;
    if (!made->charge.active)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_charge_undo(&made->charge, result);
    } else if (!measure(made)) {
        CALL(cuCtxDestroy_v2, *context); /* the new context has no launches yet */
        vgpu_account_set_context(vgpu_tenant_account(), (unsigned)device, made->before);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        contexts[device].live++;
        vgpu_in_flight_note(*context);
    }
    done(made);
    return result;
}

#define CREATE_BODY(symbol, ...)                                     \
    do {                                                             \
        struct creation made;                                        \
        vgpu_suspended_call();                                       \
        int cancels = creation_begins();                             \
        CUresult result = begin(&made, dev);                         \
        if (result == CUDA_SUCCESS)                                  \
            result = finish(&made, CALL(symbol, __VA_ARGS__), pctx); \
        creation_ends(cancels);                                      \
        return result;                                               \
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

VGPU_EXPORT CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
                                    CUdevice dev)
{
    CREATE_BODY(cuCtxCreate_v4, pctx, ctxCreateParams, flags, dev);
}

/*
 * Returns the index in the lease of a context's device, or VGPU_NOT_IN_LEASE. Must be called before the context ends.
 */
static int index_of(CUcontext context)
{
    bool limited;
    CUdevice device;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited ||
        vgpu_device_of_context(context, &device) != CUDA_SUCCESS)
        return VGPU_NOT_IN_LEASE;
    return vgpu_device_index(device);
}

#define DESTROY_BODY(symbol)                                          \
    do {                                                              \
        vgpu_suspended_call();                                        \
        struct ending ending = ending_begins();                       \
        int device = ctx != NULL ? index_of(ctx) : VGPU_NOT_IN_LEASE; \
        vgpu_in_flight_forget(ctx);                                   \
        CUresult result = CALL(symbol, ctx);                          \
        if (result == CUDA_SUCCESS && device != VGPU_NOT_IN_LEASE)    \
            ended(device, ctx);                                       \
        ending_ends(ending);                                          \
        return result;                                                \
    } while (0)

VGPU_EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
    DESTROY_BODY(cuCtxDestroy);
}

VGPU_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    DESTROY_BODY(cuCtxDestroy_v2);
}

static bool is_current(CUcontext ctx)
{
    CUcontext current = NULL;
    return CALL(cuCtxGetCurrent, &current) == CUDA_SUCCESS && current == ctx;
}

/*
 * cuCtxDetach, which is deprecated since CUDA 4, ends the context when it drops the last reference (cuCtxAttach). Only
 * a current context can be detached. If the context is no longer current afterwards, it has ended: its handle may be
 * freed, so libvgpu does not pass the handle to the driver again.
 */
VGPU_EXPORT CUresult cuCtxDetach(CUcontext ctx)
{
    vgpu_suspended_call();
    struct ending ending = ending_begins();
    int device = ctx != NULL ? index_of(ctx) : VGPU_NOT_IN_LEASE;
    vgpu_in_flight_forget(ctx);
    CUresult result = CALL(cuCtxDetach, ctx);
    if (result == CUDA_SUCCESS && device != VGPU_NOT_IN_LEASE && !is_current(ctx))
        ended(device, ctx);
    ending_ends(ending);
    return result;
}

/* Adds a reference to an existing primary context, which costs no memory. */
static CUresult retain_more(struct device_contexts *known, CUcontext *pctx, CUdevice dev)
{
    CUresult result = CALL(cuDevicePrimaryCtxRetain, pctx, dev);
    if (result == CUDA_SUCCESS)
        known->primary_refs++;
    return result;
}

static CUresult retain_first(struct creation *made, CUcontext *pctx, CUdevice dev)
{
    CUresult result = CALL(cuDevicePrimaryCtxRetain, pctx, dev);
    struct device_contexts *known = &contexts[made->charge.device];
    if (!made->charge.active)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_charge_undo(&made->charge, result);
    } else if (!measure(made)) {
        CALL(cuDevicePrimaryCtxRelease_v2, dev);
        vgpu_account_set_context(vgpu_tenant_account(), (unsigned)made->charge.device, made->before);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        known->live++;
        known->primary = *pctx;
        vgpu_in_flight_note(*pctx);
        known->primary_refs++;
    }
    done(made);
    return result;
}

VGPU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    vgpu_suspended_call();
    struct creation made;
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS)
        return result;
    int cancels = creation_begins();
    int device = limited ? vgpu_device_index(dev) : VGPU_NOT_IN_LEASE;
    if (device != VGPU_NOT_IN_LEASE && contexts[device].primary != NULL) {
        result = retain_more(&contexts[device], pctx, dev);
    } else {
        result = begin(&made, dev);
        if (result == CUDA_SUCCESS)
            result = retain_first(&made, pctx, dev);
    }
    creation_ends(cancels);
    return result;
}

/*
 * Returns libvgpu's record of a limited device that has a primary context, or NULL; *index is the device's index in the
 * lease. Precondition: the lock `creation` is held.
 */
static struct device_contexts *primary_of(CUdevice dev, int *index)
{
    bool limited;
    *index = vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited ? vgpu_device_index(dev) : VGPU_NOT_IN_LEASE;
    if (*index == VGPU_NOT_IN_LEASE || contexts[*index].primary == NULL)
        return NULL;
    return &contexts[*index];
}

/* Called before the driver may end a primary context: libvgpu's own objects in it are freed while it is alive. */
static void primary_ends(const struct device_contexts *known, int index)
{
    vgpu_in_flight_forget(known->primary);
    vgpu_primary_ends(index, vgpu_in_flight_forget);
}

static void primary_ended(struct device_contexts *known, int index)
{
    ended(index, known->primary);
    known->primary = NULL;
    known->primary_refs = 0;
    vgpu_primary_ends(index, vgpu_capture_forget);
    vgpu_primary_ended(index);
}

/*
 * Checks whether the primary context has ended. Green contexts keep it alive too, and only the driver knows for how
 * long.
 */
static void end_if_inactive(struct device_contexts *known, int index, CUdevice dev)
{
    unsigned int flags;
    int active = 0;
    if (known->primary_refs == 0 && (CALL(cuDevicePrimaryCtxGetState, dev, &flags, &active) != CUDA_SUCCESS || !active))
        primary_ended(known, index);
}

void vgpu_context_look(CUdevice dev)
{
    int index;
    struct ending ending = ending_begins();
    struct device_contexts *known = primary_of(dev, &index);
    if (known != NULL)
        end_if_inactive(known, index, dev);
    ending_ends(ending);
}

CUcontext vgpu_context_primary(int index)
{
    int cancels = creation_begins();
    CUcontext primary = contexts[index].primary;
    creation_ends(cancels);
    return primary;
}

#define RELEASE_BODY(symbol)                                     \
    do {                                                         \
        int index;                                               \
        vgpu_suspended_call();                                   \
        struct ending ending = ending_begins();                  \
        struct device_contexts *known = primary_of(dev, &index); \
        if (known != NULL && known->primary_refs <= 1)           \
            primary_ends(known, index);                          \
        CUresult result = CALL(symbol, dev);                     \
        if (result == CUDA_SUCCESS && known != NULL) {           \
            known->primary_refs -= known->primary_refs > 0;      \
            end_if_inactive(known, index, dev);                  \
        }                                                        \
        ending_ends(ending);                                     \
        return result;                                           \
    } while (0)

#define RESET_BODY(symbol)                                       \
    do {                                                         \
        int index;                                               \
        vgpu_suspended_call();                                   \
        struct ending ending = ending_begins();                  \
        struct device_contexts *known = primary_of(dev, &index); \
        if (known != NULL)                                       \
            primary_ends(known, index);                          \
        CUresult result = CALL(symbol, dev);                     \
        if (result == CUDA_SUCCESS && known != NULL)             \
            primary_ended(known, index);                         \
        ending_ends(ending);                                     \
        return result;                                           \
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

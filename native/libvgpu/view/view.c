/* view.c: the memory figures that a tenant's program sees: those of its slice. */
#include <pthread.h>
#include <time.h>

#include "suspended.h"
#include "device.h"
#include "functions.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "relocated.h"
#include "pool.h"
#include "process_memory.h"
#include "tenant.h"
#include "unknown.h"

/*
 * Starts NVML early if the size of a context is not known for a device of the lease, because this process then has to
 * measure it by NVML.
 */
static void warm(void)
{
    const struct vgpu_usage *usage = vgpu_tenant_account()->usage;
    for (unsigned d = 0; d < vgpu_tenant_devices() && !vgpu_process_memory_ready(); d++)
        if (__atomic_load_n(&usage->context_mib[d], __ATOMIC_RELAXED) == 0) {
            vgpu_process_memory_warm();
            return;
        }
}

VGPU_EXPORT CUresult cuInit(unsigned int flags)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result == CUDA_SUCCESS && limited) {
        warm();
        /* waits here for the resume: after cuInit, calls would wait inside the driver, where vgpud does not see them */
        vgpu_suspended_wait();
        vgpu_relocated_follow();
        vgpu_unknown_tell(vgpu_tenant_account()->usage);
    }
    return result == CUDA_SUCCESS ? CALL(cuInit, flags) : result;
}

/*
 * Programs call this often, so the function does not wait for the resume of a suspended lease in advance. While
 * suspended, the driver answers from its cache, except for the clocks (error 304 on an H200, driver 580.159.04). Such a
 * query waits and is repeated.
 */
VGPU_EXPORT CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    CUresult result = CALL(cuDeviceGetAttribute, pi, attrib, dev);
    if (result != CUDA_ERROR_OPERATING_SYSTEM || !vgpu_suspended_now())
        return result;
    vgpu_suspended_call();
    return CALL(cuDeviceGetAttribute, pi, attrib, dev);
}

struct slice {
    uint64_t total;
    uint64_t free;
};

/* Returns the tenant's view of the slice. `card` has the driver's figures, which are used if they are smaller. */
static struct slice slice_of(unsigned device, struct slice card)
{
    uint64_t limit = vgpu_tenant_limit(device);
    uint64_t used = vgpu_account_sum(vgpu_tenant_account()->usage, device);
    struct slice slice = {.total = limit < card.total ? limit : card.total, .free = used < limit ? limit - used : 0};
    slice.free = slice.free < card.free ? slice.free : card.free;
    return slice;
}

/*
 * Returns the index of the current context's device, or VGPU_NOT_IN_LEASE if a query is answered with the driver's own
 * figures.
 */
static int limited_current(void)
{
    CUdevice device;
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited || vgpu_device_current(&device) != CUDA_SUCCESS)
        return VGPU_NOT_IN_LEASE;
    return vgpu_device_index(device);
}

/* Converts a size for the first version of a call, which has 32 bits. Larger values become the maximum. */
static unsigned narrow(uint64_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes;
}

/* The card's own figures for a device, as last read from the driver. */
struct card {
    uint64_t at_ns; /* time of the reading in CLOCK_MONOTONIC; 0: never read */
    uint64_t total;
    uint64_t free;
};
static struct card cards[VGPU_MAX_DEVICES];
static pthread_mutex_t card_mutex = PTHREAD_MUTEX_INITIALIZER;

/*
 * Time for which the card's free memory is cached. The figure matters only under overcommit, and the driver needs 3 us
 * to report it. While the lease is suspended, the figure is cached until the resume: the driver would return an error
 * (304 on an H200, driver 580.159.04), and a query should not resume the tenant.
 */
#define CARD_FRESH_NS 1000000u

static bool is_fresh(const struct card *card, uint64_t now_ns)
{
    return card->at_ns != 0 && (now_ns - card->at_ns <= CARD_FRESH_NS || vgpu_suspended_now());
}

static CUresult card_of(unsigned device, struct slice *slice)
{
    size_t free = 0;
    size_t total = 0;
    struct timespec now;
    CUresult result = CUDA_SUCCESS;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    pthread_mutex_lock(&card_mutex);
    struct card *card = &cards[device];
    if (!is_fresh(card, now_ns)) {
        vgpu_suspended_check();
        result = CALL(cuMemGetInfo_v2, &free, &total);
        if (result == CUDA_SUCCESS)
            *card = (struct card){.at_ns = now_ns, .total = total, .free = free};
    }
    *slice = (struct slice){.total = card->total, .free = card->free};
    pthread_mutex_unlock(&card_mutex);
    return result;
}

static void reset(void)
{
    pthread_mutex_init(&card_mutex, NULL);
}
VGPU_IN_CHILD(reset);

VGPU_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    struct slice card;
    int device = limited_current();
    if (device == VGPU_NOT_IN_LEASE || (free == NULL && total == NULL))
        return CALL(cuMemGetInfo_v2, free, total);
    CUresult result = card_of((unsigned)device, &card);
    if (result != CUDA_SUCCESS)
        return result;
    if (!vgpu_suspended_now()) { /* while suspended, NVML lists none of the memory, and the driver may not answer */
        vgpu_overhead_if_stale(device);
        vgpu_pool_synchronised();
    }
    struct slice slice = slice_of((unsigned)device, card);
    if (free != NULL)
        *free = slice.free;
    if (total != NULL)
        *total = slice.total;
    return result;
}

VGPU_EXPORT CUresult cuMemGetInfo(unsigned int *free, unsigned int *total)
{
    vgpu_suspended_check();
    CUresult result = CALL(cuMemGetInfo, free, total);
    int device = result == CUDA_SUCCESS ? limited_current() : VGPU_NOT_IN_LEASE;
    if (device == VGPU_NOT_IN_LEASE)
        return result;
    struct slice card = {.total = total != NULL ? *total : UINT32_MAX, .free = free != NULL ? *free : UINT32_MAX};
    struct slice slice = slice_of((unsigned)device, card);
    if (free != NULL)
        *free = narrow(slice.free);
    if (total != NULL)
        *total = narrow(slice.total);
    return result;
}

static uint64_t slice_total(CUdevice dev, uint64_t card)
{
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return card;
    int device = vgpu_device_index(dev);
    if (device == VGPU_NOT_IN_LEASE)
        return card;
    uint64_t limit = vgpu_tenant_limit((unsigned)device);
    return limit < card ? limit : card;
}

VGPU_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuDeviceTotalMem_v2, bytes, dev);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = slice_total(dev, *bytes);
    return result;
}

VGPU_EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuDeviceTotalMem, bytes, dev);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = narrow(slice_total(dev, *bytes));
    return result;
}

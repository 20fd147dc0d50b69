/*
 * nvml.c: NVML's memory figures inside a slice. A program that only looks (nvidia-smi) never calls
 * cuInit, so this reads the lease by itself, claims no slot and registers nowhere.
 */
#include <pthread.h>
#include <string.h>

#include "account.h"
#include "functions.h"
#include "lease_open.h"
#include "limits.h"

enum { UNKNOWN, ABSENT, PRESENT };
static int state;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
/* Never closed: closing any descriptor of `usage` would drop the slot's lock of a process that also computes. */
static struct vgpu_lease_view view;

static bool lease_present(void)
{
    int now = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
    if (now == UNKNOWN) {
        pthread_mutex_lock(&opening);
        if (state == UNKNOWN)
            __atomic_store_n(&state, vgpu_lease_open(&view, 0) == 1 ? PRESENT : ABSENT, __ATOMIC_RELEASE);
        now = state;
        pthread_mutex_unlock(&opening);
    }
    return now == PRESENT;
}

struct slice {
    unsigned long long total;
    unsigned long long used;
    unsigned long long free;
};

static int lease_index(nvmlDevice_t device, const struct vgpu_limits *limits)
{
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    unsigned char asked[16];
    unsigned char held[16];
    if (CALL_NVML(nvmlDeviceGetUUID, device, uuid, sizeof(uuid)) != NVML_SUCCESS || vgpu_uuid_parse(uuid, asked) != 0)
        return -1;
    for (unsigned i = 0; i < limits->device_count; i++)
        if (vgpu_uuid_parse(limits->devices[i].uuid, held) == 0 && memcmp(asked, held, sizeof(held)) == 0)
            return (int)i;
    return -1;
}

/* The slice of a device, if it is in the lease. Without a readable `usage` (another user asks) the
 * card's own use stands in, as far as it fits. */
static bool slice_of(nvmlDevice_t device, unsigned long long card_total, unsigned long long card_used, struct slice *slice)
{
    struct vgpu_limits limits;
    if (!lease_present())
        return false;
    if (vgpu_limits_read(view.limits, &limits) != 0)
        limits = view.first;
    int index = lease_index(device, &limits);
    if (index < 0)
        return false;
    uint64_t limit = limits.devices[index].memory_bytes;
    uint64_t used = view.usage != NULL ? vgpu_account_sum(view.usage, (unsigned)index) : card_used;
    slice->total = limit < card_total ? limit : card_total;
    slice->used = used < slice->total ? used : slice->total;
    slice->free = slice->total - slice->used;
    return true;
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct slice slice;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetMemoryInfo, device, memory);
    if (result == NVML_SUCCESS && slice_of(device, memory->total, memory->used, &slice)) {
        memory->total = slice.total;
        memory->used = slice.used;
        memory->free = slice.free;
    }
    return result;
}

/* What the driver keeps for itself is not the slice's: total = used + free, reserved is 0. */
VGPU_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct slice slice;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetMemoryInfo_v2, device, memory);
    if (result == NVML_SUCCESS && slice_of(device, memory->total, memory->used, &slice)) {
        memory->total = slice.total;
        memory->reserved = 0;
        memory->used = slice.used;
        memory->free = slice.free;
    }
    return result;
}

/* nvml.c: NVML's memory figures as a program inside a slice sees them. */
#include "account.h"
#include "functions.h"
#include "nvml_slice.h"

struct slice {
    unsigned long long total;
    unsigned long long used;
    unsigned long long free;
};

/*
 * Finds the slice of a device, if it is in the lease. If `usage` is not readable (another user asks), the card's own
 * use is shown, up to the limit.
 */
static bool slice_of(nvmlDevice_t device, unsigned long long card_total, unsigned long long card_used,
                     struct slice *slice)
{
    uint64_t limit;
    int index = vgpu_nvml_index(device, &limit);
    if (index < 0)
        return false;
    const struct vgpu_usage *usage = vgpu_nvml_lease()->usage;
    uint64_t used = usage != NULL ? vgpu_account_settled(usage, (unsigned)index) : card_used;
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

/* The driver's reserve is not part of the slice: total = used + free, and reserved is 0. */
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

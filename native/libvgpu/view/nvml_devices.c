/*
 * nvml_devices.c: NVML's devices inside a slice: those of the lease, in NVML's order, as in a container that has no
 * others. CUDA shows the same devices, through CUDA_VISIBLE_DEVICES.
 *
 * NVML's list contains only cards: a slice in a MIG device appears as the card of that MIG device. The handle of a MIG
 * device outside of the lease is hidden, too. A device handle that a program keeps through a move of its tenant stays
 * valid.
 */
#include <string.h>

#include "functions.h"
#include "lease_limits.h"
#include "nvml_slice.h"

struct visible {
    unsigned count;
    nvmlDevice_t devices[VGPU_MAX_DEVICES];
};

/* Returns the card of a MIG device; of a card, the card itself. */
static nvmlDevice_t card_of(nvmlDevice_t device)
{
    nvmlDevice_t card;
    return CALL_NVML(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, device, &card) == NVML_SUCCESS ? card : device;
}

static bool is_in(const struct visible *list, nvmlDevice_t device)
{
    for (unsigned i = 0; i < list->count; i++)
        if (list->devices[i] == device)
            return true;
    return false;
}

/*
 * Adds the card of the device `uuid` to the list, once, in the order of NVML's indices. Asks NVML about no other
 * device, because NVML would wake that device.
 */
static void add(struct visible *list, unsigned indices[VGPU_MAX_DEVICES], const char *uuid)
{
    nvmlDevice_t device;
    unsigned index;
    if (CALL_NVML(nvmlDeviceGetHandleByUUID, uuid, &device) != NVML_SUCCESS)
        return; /* NVML does not answer: the device is lost */
    if (strncmp(uuid, "MIG-", 4) == 0)
        device = card_of(device);
    if (is_in(list, device) || CALL_NVML(nvmlDeviceGetIndex, device, &index) != NVML_SUCCESS)
        return;
    unsigned at = list->count++;
    for (; at > 0 && indices[at - 1] > index; at--) {
        indices[at] = indices[at - 1];
        list->devices[at] = list->devices[at - 1];
    }
    indices[at] = index;
    list->devices[at] = device;
}

/* Lists the cards of the lease. Returns false if the process has no lease. Precondition: NVML is initialised. */
static bool see(struct visible *list)
{
    unsigned indices[VGPU_MAX_DEVICES];
    struct vgpu_limits limits;
    const struct vgpu_lease_view *lease = vgpu_nvml_lease();
    if (lease == NULL)
        return false;
    if (vgpu_limits_read(lease->limits, &limits) != 0)
        limits = lease->first;
    list->count = 0;
    for (unsigned i = 0; i < limits.device_count && i < VGPU_MAX_DEVICES; i++)
        add(list, indices, limits.devices[i].uuid);
    return true;
}

static bool is_visible(nvmlDevice_t device)
{
    struct visible list;
    uint64_t limit_bytes;
    return !see(&list) || is_in(&list, device) || vgpu_nvml_index(device, &limit_bytes) >= 0;
}

#define COUNT(symbol)                                          \
    VGPU_EXPORT nvmlReturn_t symbol(unsigned int *deviceCount) \
    {                                                          \
        struct visible list;                                   \
        nvmlReturn_t result = CALL_NVML(symbol, deviceCount);  \
        if (result == NVML_SUCCESS && see(&list))              \
            *deviceCount = list.count;                         \
        return result;                                         \
    }

COUNT(nvmlDeviceGetCount)
COUNT(nvmlDeviceGetCount_v2)

#define BY_INDEX(symbol)                                                      \
    VGPU_EXPORT nvmlReturn_t symbol(unsigned int index, nvmlDevice_t *device) \
    {                                                                         \
        struct visible list;                                                  \
        unsigned listed;                                                      \
        nvmlReturn_t result = CALL_NVML(nvmlDeviceGetCount_v2, &listed);      \
        if (result != NVML_SUCCESS || device == NULL || !see(&list))          \
            return CALL_NVML(symbol, index, device);                          \
        if (index >= list.count)                                              \
            return NVML_ERROR_INVALID_ARGUMENT;                               \
        *device = list.devices[index];                                        \
        return NVML_SUCCESS;                                                  \
    }

BY_INDEX(nvmlDeviceGetHandleByIndex)
BY_INDEX(nvmlDeviceGetHandleByIndex_v2)

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    struct visible list;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetIndex, device, index);
    if (result != NVML_SUCCESS || !see(&list))
        return result;
    for (unsigned i = 0; i < list.count; i++)
        if (list.devices[i] == device)
            *index = i;
    return result;
}

/* Changes NVML's answer to an error if NVML found a device outside of the lease by a UUID, serial number or bus id. */
static nvmlReturn_t hidden(nvmlReturn_t result, nvmlDevice_t *device)
{
    if (result != NVML_SUCCESS || is_visible(*device))
        return result;
    *device = NULL;
    return NVML_ERROR_NOT_FOUND;
}

#define BY_NAME(symbol, type)                                        \
    VGPU_EXPORT nvmlReturn_t symbol(type name, nvmlDevice_t *device) \
    {                                                                \
        return hidden(CALL_NVML(symbol, name, device), device);      \
    }

BY_NAME(nvmlDeviceGetHandleByUUID, const char *)
BY_NAME(nvmlDeviceGetHandleByUUIDV, const nvmlUUID_t *)
BY_NAME(nvmlDeviceGetHandleBySerial, const char *)
BY_NAME(nvmlDeviceGetHandleByPciBusId, const char *)
BY_NAME(nvmlDeviceGetHandleByPciBusId_v2, const char *)

/* Takes hidden devices out of a list that NVML made. */
static nvmlReturn_t kept(nvmlReturn_t result, unsigned *count, nvmlDevice_t *devices)
{
    unsigned left = 0;
    if (result != NVML_SUCCESS || devices == NULL)
        return result;
    for (unsigned i = 0; i < *count; i++)
        if (is_visible(devices[i]))
            devices[left++] = devices[i];
    *count = left;
    return result;
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
                                                          unsigned int *count, nvmlDevice_t *deviceArray)
{
    return kept(CALL_NVML(nvmlDeviceGetTopologyNearestGpus, device, level, count, deviceArray), count, deviceArray);
}

VGPU_EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpuNumber, unsigned int *count,
                                                     nvmlDevice_t *deviceArray)
{
    return kept(CALL_NVML(nvmlSystemGetTopologyGpuSet, cpuNumber, count, deviceArray), count, deviceArray);
}

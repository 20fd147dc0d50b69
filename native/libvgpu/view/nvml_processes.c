/*
 * nvml_processes.c: NVML's lists of processes inside a slice: the tenant's own processes, by the pids of its own
 * namespace, with the memory that the lease counts. In a container NVML itself lists none of them.
 */
#include <string.h>

#include "functions.h"
#include "nvml_slice.h"

/*
 * Answers a list call as NVML does: with the number of entries alone, an error for too small a buffer, or the entries.
 */
#define LIST_BODY(symbol, copy)                                                                 \
    do {                                                                                        \
        uint64_t limit;                                                                         \
        nvmlProcessInfo_t own[VGPU_MAX_SLOTS];                                                  \
        int index = device != NULL && infoCount != NULL ? vgpu_nvml_index(device, &limit) : -1; \
        if (index < 0)                                                                          \
            return CALL_NVML(symbol, device, infoCount, infos);                                 \
        unsigned count = vgpu_nvml_processes(index, own, VGPU_MAX_SLOTS);                       \
        unsigned room = infos != NULL ? *infoCount : 0;                                         \
        *infoCount = count;                                                                     \
        if (count > room)                                                                       \
            return NVML_ERROR_INSUFFICIENT_SIZE;                                                \
        for (unsigned i = 0; i < count; i++)                                                    \
            infos[i] = copy(own[i]);                                                            \
        return NVML_SUCCESS;                                                                    \
    } while (0)

#define SHORT_FORM(info) ((nvmlProcessInfo_v1_t){.pid = (info).pid, .usedGpuMemory = (info).usedGpuMemory})
#define FULL_FORM(info) (info)

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *infoCount,
                                                              nvmlProcessInfo_v1_t *infos)
{
    LIST_BODY(nvmlDeviceGetComputeRunningProcesses, SHORT_FORM);
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount,
                                                                 nvmlProcessInfo_v2_t *infos)
{
    LIST_BODY(nvmlDeviceGetComputeRunningProcesses_v2, FULL_FORM);
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount,
                                                                 nvmlProcessInfo_t *infos)
{
    LIST_BODY(nvmlDeviceGetComputeRunningProcesses_v3, FULL_FORM);
}

#define EMPTY_LIST(symbol, type)                                                               \
    VGPU_EXPORT nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *infoCount, type *infos) \
    {                                                                                          \
        uint64_t limit;                                                                        \
        if (device == NULL || infoCount == NULL || vgpu_nvml_index(device, &limit) < 0)        \
            return CALL_NVML(symbol, device, infoCount, infos);                                \
        *infoCount = 0;                                                                        \
        return NVML_SUCCESS;                                                                   \
    }

EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

/* The tenant's own pids. Entries with other pids belong to other tenants and are removed. */
struct own {
    bool limited;
    unsigned count;
    nvmlProcessInfo_t processes[VGPU_MAX_SLOTS];
};

static void own_of(nvmlDevice_t device, struct own *own)
{
    uint64_t limit;
    int index = device != NULL ? vgpu_nvml_index(device, &limit) : -1;
    own->limited = index >= 0;
    own->count = own->limited ? vgpu_nvml_processes(index, own->processes, VGPU_MAX_SLOTS) : 0;
}

static bool is_own(const struct own *own, unsigned pid)
{
    for (unsigned i = 0; i < own->count && i < VGPU_MAX_SLOTS; i++)
        if (own->processes[i].pid == pid)
            return true;
    return !own->limited;
}

/* Moves the entries of the tenant's own processes to the front, and sets the new count. */
#define KEEP_OWN(own, list, number, pid_of)        \
    do {                                           \
        unsigned kept_ = 0;                        \
        for (unsigned i_ = 0; i_ < (number); i_++) \
            if (is_own(own, pid_of((list)[i_])))   \
                (list)[kept_++] = (list)[i_];      \
        (number) = kept_;                          \
    } while (0)

#define PID_FIELD(entry) (entry).pid
#define PID_ITSELF(entry) (entry)

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                         nvmlProcessUtilizationSample_t *utilization,
                                                         unsigned int *processSamplesCount,
                                                         unsigned long long lastSeenTimeStamp)
{
    struct own own;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetProcessUtilization, device, utilization, processSamplesCount,
                                    lastSeenTimeStamp);
    if (result != NVML_SUCCESS || utilization == NULL)
        return result;
    own_of(device, &own);
    KEEP_OWN(&own, utilization, *processSamplesCount, PID_FIELD);
    return result;
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                               nvmlProcessesUtilizationInfo_t *procesesUtilInfo)
{
    struct own own;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetProcessesUtilizationInfo, device, procesesUtilInfo);
    if (result != NVML_SUCCESS || procesesUtilInfo->procUtilArray == NULL)
        return result;
    own_of(device, &own);
    KEEP_OWN(&own, procesesUtilInfo->procUtilArray, procesesUtilInfo->processSamplesCount, PID_FIELD);
    return result;
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *plist)
{
    struct own own;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetRunningProcessDetailList, device, plist);
    if (result != NVML_SUCCESS || plist->procArray == NULL)
        return result;
    own_of(device, &own);
    KEEP_OWN(&own, plist->procArray, plist->numProcArrayEntries, PID_FIELD);
    return result;
}

VGPU_EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    struct own own;
    nvmlReturn_t result = CALL_NVML(nvmlDeviceGetAccountingPids, device, count, pids);
    if (result != NVML_SUCCESS || pids == NULL)
        return result;
    own_of(device, &own);
    KEEP_OWN(&own, pids, *count, PID_ITSELF);
    return result;
}

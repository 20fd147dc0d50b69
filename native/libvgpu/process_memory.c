#include "process_memory.h"

#include <stdlib.h>
#include <unistd.h>

#include "functions.h"
#include "arbiter_link.h"

#define PROCESSES_MAX 1024u /* on one device; more than a card can have contexts */

/* NVML counts initialisations; this one is kept for the life of the process. */
static bool nvml_ready(void)
{
    static bool ready; /* set under context.c's `creation` */
    if (!ready)
        ready = vgpu_library_load(VGPU_NVML) && CALL_NVML(nvmlInit_v2) == NVML_SUCCESS;
    return ready;
}

/* NVML names processes by the pid of the namespace it answers in: the arbiter's word for it or our own. */
static bool pick(const nvmlProcessInfo_t *processes, unsigned count, uint64_t *bytes)
{
    const unsigned pids[] = {(unsigned)vgpu_link_host_pid(), (unsigned)getpid()};
    for (unsigned p = 0; p < 2; p++)
        for (unsigned i = 0; i < count; i++)
            if (processes[i].pid == pids[p] && processes[i].usedGpuMemory != (unsigned long long)NVML_VALUE_NOT_AVAILABLE) {
                *bytes = processes[i].usedGpuMemory;
                return true;
            }
    return false;
}

bool vgpu_process_memory(const char *uuid, uint64_t *bytes)
{
    nvmlDevice_t device;
    unsigned count = PROCESSES_MAX;
    if (!nvml_ready() || CALL_NVML(nvmlDeviceGetHandleByUUID, uuid, &device) != NVML_SUCCESS)
        return false;
    nvmlProcessInfo_t *processes = calloc(count, sizeof(*processes));
    bool known = processes != NULL &&
                 CALL_NVML(nvmlDeviceGetComputeRunningProcesses_v3, device, &count, processes) == NVML_SUCCESS &&
                 pick(processes, count, bytes);
    free(processes);
    return known;
}

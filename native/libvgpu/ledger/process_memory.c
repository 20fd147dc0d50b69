#include "process_memory.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "arbiter_link.h"
#include "functions.h"
#include "in_child.h"
#include "tenant.h"
#include "thread.h"

#define PROCESSES_MAX 1024u /* maximum of processes on one device: more than a card can have contexts */
#define STACK_BYTES (256 * 1024)

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static bool ready; /* true: NVML is initialised; this initialisation is kept until the process ends */
static nvmlDevice_t handles[VGPU_MAX_DEVICES];
static char handle_uuids[VGPU_MAX_DEVICES][VGPU_UUID_BYTES];
static nvmlProcessInfo_t processes[PROCESSES_MAX];

static bool nvml_ready(void)
{
    int cancels = vgpu_thread_keep();
    pthread_mutex_lock(&starting);
    if (!ready && vgpu_library_load(VGPU_NVML) && CALL_NVML(nvmlInit_v2) == NVML_SUCCESS)
        __atomic_store_n(&ready, true, __ATOMIC_RELEASE);
    bool now = ready;
    pthread_mutex_unlock(&starting);
    vgpu_thread_release(cancels);
    return now;
}

bool vgpu_process_memory_ready(void)
{
    return __atomic_load_n(&ready, __ATOMIC_ACQUIRE);
}

static void *warm(void *unused)
{
    (void)unused;
    nvml_ready();
    return NULL;
}

void vgpu_process_memory_warm(void)
{
    /* without the thread, the first measurement starts NVML, and takes longer */
    (void)vgpu_thread_start(warm, NULL, STACK_BYTES, NULL);
}

static bool handle_of(unsigned device, nvmlDevice_t *handle)
{
    char uuid[VGPU_UUID_BYTES];
    vgpu_tenant_uuid(device, uuid);
    if (strcmp(uuid, handle_uuids[device]) != 0) {
        if (CALL_NVML(nvmlDeviceGetHandleByUUID, uuid, &handles[device]) != NVML_SUCCESS)
            return false;
        memcpy(handle_uuids[device], uuid, sizeof(uuid));
    }
    *handle = handles[device];
    return true;
}

/*
 * Finds this process in NVML's list. NVML uses the pids of the namespace in which it answers: the host's (which the
 * arbiter reports) or the process's own.
 */
static bool pick(nvmlReturn_t answer, unsigned count, uint64_t *bytes)
{
    if (answer != NVML_SUCCESS)
        return false;
    const unsigned pids[] = {(unsigned)vgpu_link_host_pid(), (unsigned)getpid()};
    for (unsigned p = 0; p < 2; p++)
        for (unsigned i = 0; i < count; i++)
            if (processes[i].pid == pids[p] &&
                processes[i].usedGpuMemory != (unsigned long long)NVML_VALUE_NOT_AVAILABLE) {
                *bytes = processes[i].usedGpuMemory;
                return true;
            }
    return false;
}

bool vgpu_process_memory(unsigned device, uint64_t *bytes)
{
    nvmlDevice_t handle;
    unsigned count = PROCESSES_MAX;
    if (!nvml_ready() || !handle_of(device, &handle))
        return false;
    nvmlReturn_t answer = CALL_NVML(nvmlDeviceGetComputeRunningProcesses_v3, handle, &count, processes);
    if (pick(answer, count, bytes))
        return true;
    count = PROCESSES_MAX; /* NVML lists MPS clients by a separate call */
    answer = CALL_NVML(nvmlDeviceGetMPSComputeRunningProcesses_v3, handle, &count, processes);
    return pick(answer, count, bytes);
}

static void reset(void)
{
    pthread_mutex_init(&starting, NULL);
    ready = false;
    memset(handle_uuids, 0, sizeof(handle_uuids));
}
VGPU_IN_CHILD(reset);

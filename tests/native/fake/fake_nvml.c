/* fake_nvml.c: the few NVML calls that the limiter and its tests use, over fake_cuda.c. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <dlfcn.h>
#include <nvml.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define CARD_BYTES (8ull << 30)

static int devices[2];        /* the address of an element is the device's handle */
API unsigned fake_nvml_looks; /* number of calls that list processes */

static int index_of(nvmlDevice_t device)
{
    return (int)((int *)device - devices);
}

API nvmlReturn_t nvmlInit_v2(void)
{
    while (getenv("FAKE_NVML_NEVER_STARTS") != NULL)
        pause();
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    *device = (nvmlDevice_t)&devices[index];
    return index < 2 ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned size)
{
    snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012x", index_of(device) + 1);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    size_t length = strlen(uuid);
    unsigned index = (unsigned)(uuid[length - 1] - '1');
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    uint64_t (*bytes)(int) = NULL;
    __atomic_add_fetch(&fake_nvml_looks, 1, __ATOMIC_RELAXED);
    if (cuda != NULL)
        *(void **)&bytes = dlsym(cuda, "fake_cuda_process_bytes");
    if (bytes == NULL || *count < 1)
        return NVML_ERROR_UNKNOWN;
    memset(infos, 0, sizeof(*infos));
    infos[0].pid = (unsigned)getpid();
    infos[0].usedGpuMemory = bytes(index_of(device));
    *count = 1;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    (void)device;
    *memory = (nvmlMemory_t){.total = CARD_BYTES, .free = CARD_BYTES, .used = 0};
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    (void)device;
    memory->total = CARD_BYTES;
    memory->reserved = 1;
    memory->free = CARD_BYTES - 1;
    memory->used = 0;
    return NVML_SUCCESS;
}

#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The driver's functions, looked up by name because an older branch lacks the last five. */
static struct {
    CUresult (*init)(unsigned int);
    CUresult (*name)(CUresult, const char **);
    CUresult (*state)(int, CUprocessState *);
    CUresult (*lock)(int, CUcheckpointLockArgs *);
    CUresult (*save)(int, CUcheckpointCheckpointArgs *);
    CUresult (*restore)(int, CUcheckpointRestoreArgs *);
    CUresult (*unlock)(int, CUcheckpointUnlockArgs *);
} cuda;

struct driver_copy cuda_copy;
static void *opened;

static void look_up(void *library, const char *name, void *where)
{
    void *found = dlsym(library, name);
    /* POSIX lets a symbol be a function, but C has no cast to a function pointer */
    memcpy(where, &found, sizeof(found));
}

const char *driver_open(void)
{
    /* with a single connection, a context for copies is made in half the time (0.06 s on an H200) */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return "libcuda.so.1 is not on this node";
    opened = library;
    look_up(library, "cuInit", &cuda.init);
    look_up(library, "cuGetErrorName", &cuda.name);
    look_up(library, "cuCheckpointProcessGetState", &cuda.state);
    look_up(library, "cuCheckpointProcessLock", &cuda.lock);
    look_up(library, "cuCheckpointProcessCheckpoint", &cuda.save);
    look_up(library, "cuCheckpointProcessRestore", &cuda.restore);
    look_up(library, "cuCheckpointProcessUnlock", &cuda.unlock);
    if (cuda.init == NULL)
        return "libcuda.so.1 is not NVIDIA's";
    if (cuda.state == NULL || cuda.lock == NULL || cuda.save == NULL || cuda.restore == NULL || cuda.unlock == NULL)
        return "this driver cannot suspend processes: branch 570 is the first that can";
    CUresult result = cuda.init(0);
    return result == CUDA_SUCCESS ? NULL : driver_name(result);
}

bool driver_copies(void)
{
    static const char *const names[] = {
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetUuid_v2",
        "cuDeviceCanAccessPeer",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync_v2",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemSetAccess",
    };
    void *found[sizeof(names) / sizeof(names[0])];
    _Static_assert(sizeof(found) == sizeof(cuda_copy), "one name for each function, in order");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if ((found[i] = dlsym(opened, names[i])) == NULL)
            return false;
    memcpy(&cuda_copy, found, sizeof(found));
    return true;
}

const char *driver_name(CUresult result)
{
    const char *name = NULL;
    if (cuda.name == NULL || cuda.name(result, &name) != CUDA_SUCCESS || name == NULL)
        return "CUDA_ERROR_UNKNOWN";
    return name;
}

CUresult driver_state(int pid, CUprocessState *state)
{
    return cuda.state(pid, state);
}

CUresult driver_lock(int pid, unsigned int timeout_ms)
{
    CUcheckpointLockArgs arguments = {.timeoutMs = timeout_ms};
    return cuda.lock(pid, &arguments);
}

CUresult driver_save(int pid)
{
    return cuda.save(pid, NULL);
}

CUresult driver_restore(int pid, const CUcheckpointGpuPair *pairs, unsigned int count)
{
    CUcheckpointGpuPair own[DRIVER_PAIRS_MAX];
    if (count > DRIVER_PAIRS_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (count == 0)
        return cuda.restore(pid, NULL);
    memcpy(own, pairs, count * sizeof(*pairs));
    CUcheckpointRestoreArgs arguments = {.gpuPairs = own, .gpuPairsCount = count};
    return cuda.restore(pid, &arguments);
}

CUresult driver_unlock(int pid)
{
    return cuda.unlock(pid, NULL);
}

bool driver_uuid(const char *text, CUuuid *uuid)
{
    unsigned int byte;
    int used;
    if (strncmp(text, "GPU-", 4) != 0)
        return false;
    text += 4;
    for (size_t i = 0; i < sizeof(uuid->bytes); i++) {
        if (*text == '-')
            text++;
        if (sscanf(text, "%2x%n", &byte, &used) != 1 || used != 2)
            return false;
        uuid->bytes[i] = (char)byte;
        text += 2;
    }
    return *text == '\0';
}

/*
 * Suspends a CUDA process by pid, this process or another one (state/checkpoint.c). The calls of this file run even
 * while this process is locked.
 */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* Checks that the driver is initialised, the pid is a process, and this user may control it. */
static CUresult enter(const char *function, int pid)
{
    char path[32];
    struct stat owner;
    CU_TRY(cu_enter_locked_out(function));
    CU_CHECK(pid > 0, CUDA_ERROR_INVALID_VALUE);
    snprintf(path, sizeof(path), "/proc/%d", pid);
    CU_CHECK(stat(path, &owner) == 0, CUDA_ERROR_INVALID_VALUE);
    return geteuid() == 0 || geteuid() == owner.st_uid ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
}

static bool is_zero(const void *bytes, size_t size)
{
    const char *p = bytes;
    while (size > 0 && p[size - 1] == 0)
        size--;
    return size == 0;
}

CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    CU_TRY(enter("cuCheckpointProcessGetState", pid));
    CU_CHECK(state != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_lock(cu.s);
    const struct sim_proc *p = sim_proc_find(cu.s, (uint32_t)pid);
    if (p != NULL)
        *state = (CUprocessState)sim_gate_of(atomic_load(&p->gate));
    sim_unlock(cu.s);
    return p != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* On hardware, this returns the thread that CRIU must leave running; the simulated driver has no such thread. */
CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    CU_TRY(enter("cuCheckpointProcessGetRestoreThreadId", pid));
    CU_CHECK(tid != NULL, CUDA_ERROR_INVALID_VALUE);
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    CU_TRY(enter("cuCheckpointProcessLock", pid));
    CU_CHECK(args == NULL || (args->reserved0 == 0 && is_zero(args->reserved1, sizeof(args->reserved1))),
             CUDA_ERROR_INVALID_VALUE);
    return (CUresult)sim_checkpoint_lock(cu.s, (uint32_t)pid, args == NULL ? 0 : args->timeoutMs);
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    CU_TRY(enter("cuCheckpointProcessCheckpoint", pid));
    CU_CHECK(args == NULL || is_zero(args, sizeof(*args)), CUDA_ERROR_INVALID_VALUE);
    return (CUresult)sim_checkpoint_save(cu.s, (uint32_t)pid);
}

static uint8_t card_with(const CUuuid *uuid)
{
    CUuuid found;
    for (uint32_t i = 0; i < cu.s->device_count; i++) {
        cu_parse_uuid(cu.s->devices[i].uuid, &found);
        if (memcmp(&found, uuid, sizeof(found)) == 0)
            return (uint8_t)i;
    }
    return SIM_MAX_DEVICES;
}

static CUresult read_pairs(const CUcheckpointRestoreArgs *args, uint8_t *card_of)
{
    size_t known = offsetof(CUcheckpointRestoreArgs, gpuPairsCount) + sizeof(args->gpuPairsCount);
    CU_CHECK(is_zero((const char *)args + known, sizeof(*args) - known), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(args->gpuPairs != NULL || args->gpuPairsCount == 0, CUDA_ERROR_INVALID_VALUE);
    memset(card_of, SIM_MAX_DEVICES, SIM_MAX_DEVICES);
    for (unsigned int i = 0; i < args->gpuPairsCount; i++) {
        uint8_t from = card_with(&args->gpuPairs[i].oldUuid);
        uint8_t to = card_with(&args->gpuPairs[i].newUuid);
        CU_CHECK(from < SIM_MAX_DEVICES && to < SIM_MAX_DEVICES, CUDA_ERROR_INVALID_VALUE);
        card_of[from] = to;
    }
    return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    uint8_t card_of[SIM_MAX_DEVICES];
    bool moves = args != NULL && args->gpuPairsCount > 0;
    CU_TRY(enter("cuCheckpointProcessRestore", pid));
    if (args != NULL)
        CU_TRY(read_pairs(args, card_of));
    return (CUresult)sim_checkpoint_restore(cu.s, (uint32_t)pid, moves ? card_of : NULL);
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    CU_TRY(enter("cuCheckpointProcessUnlock", pid));
    CU_CHECK(args == NULL || is_zero(args, sizeof(*args)), CUDA_ERROR_INVALID_VALUE);
    return (CUresult)sim_checkpoint_unlock(cu.s, (uint32_t)pid);
}

/*
 * nvml_export.c: the private table through which nvidia-smi reads its lists of processes. NVIDIA does not document it:
 * its form was found by tracing nvidia-smi of branches 535 and 550 (see native/sim/nvml/nvml_export.c), and of 580 on
 * an H200. The first word is the table's size; three entries list processes.
 *
 * A list is replaced by the slice's own only if its form is known: the driver is of a traced branch, or more than half
 * of the pids, read in this form, are in the device's public list. Any other list is passed on unchanged.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "functions.h"
#include "in_child.h"
#include "nvml_slice.h"

enum { ENTRY_COMPUTE = 213, ENTRY_GRAPHICS, ENTRY_MPS, LISTS = 3, NAME_BYTES = 4096, TABLE_MAX_BYTES = 1 << 20 };

/* One process in the form that nvidia-smi reads. */
struct listed {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint64_t unknown;
    char name[NAME_BYTES];
};
_Static_assert(sizeof(struct listed) == 4128, "the distance between entries, as observed");

typedef nvmlReturn_t (*list_fn)(nvmlDevice_t device, unsigned *count, struct listed *entries);

static list_fn originals[LISTS]; /* the original functions for compute, graphics and MPS processes */
static const void *theirs;       /* NVIDIA's export table */
static void *ours;               /* a copy of NVIDIA's table with libvgpu's lists, kept until the process ends */
static pthread_mutex_t copying = PTHREAD_MUTEX_INITIALIZER;

static bool watched_branch(void)
{
    static const char *const branches[] = {"535.", "550.", "580."};
    char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    if (CALL_NVML(nvmlSystemGetDriverVersion, version, sizeof(version)) != NVML_SUCCESS)
        return false;
    for (size_t i = 0; i < sizeof(branches) / sizeof(branches[0]); i++)
        if (strncmp(version, branches[i], strlen(branches[i])) == 0)
            return true;
    return false;
}

static nvmlReturn_t public_list(int which, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    if (which == 0)
        return CALL_NVML(nvmlDeviceGetComputeRunningProcesses_v3, device, count, infos);
    if (which == 1)
        return CALL_NVML(nvmlDeviceGetGraphicsRunningProcesses_v3, device, count, infos);
    return CALL_NVML(nvmlDeviceGetMPSComputeRunningProcesses_v3, device, count, infos);
}

/*
 * Do the entries have the known form? If the driver is of no traced branch, their pids are compared with NVML's public
 * list. More than half must match, because processes may start and end between the two calls.
 */
static bool form_known(int which, nvmlDevice_t device, unsigned count, const struct listed *entries)
{
    nvmlProcessInfo_t infos[VGPU_MAX_SLOTS];
    unsigned seen = VGPU_MAX_SLOTS;
    unsigned matching = 0;
    if (watched_branch())
        return true;
    if (count == 0 || public_list(which, device, &seen, infos) != NVML_SUCCESS)
        return false;
    for (unsigned i = 0; i < count; i++)
        for (unsigned k = 0; k < seen; k++)
            if (entries[i].pid == infos[k].pid) {
                matching++;
                break;
            }
    return matching > count / 2;
}

static nvmlReturn_t answer(int index, unsigned room, unsigned *count, struct listed *entries)
{
    nvmlProcessInfo_t own[VGPU_MAX_SLOTS];
    *count = vgpu_nvml_processes(index, own, VGPU_MAX_SLOTS);
    if (*count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        entries[i] = (struct listed){.pid = own[i].pid,
                                     .bytes = own[i].usedGpuMemory,
                                     .gpu_instance = own[i].gpuInstanceId,
                                     .compute_instance = own[i].computeInstanceId};
        CALL_NVML(nvmlSystemGetProcessName, own[i].pid, entries[i].name, NAME_BYTES);
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t list(int which, nvmlDevice_t device, unsigned *count, struct listed *entries)
{
    uint64_t limit;
    unsigned room = count != NULL ? *count : 0;
    nvmlReturn_t result = originals[which](device, count, entries);
    if (result != NVML_SUCCESS || count == NULL || entries == NULL)
        return result;
    int index = vgpu_nvml_index(device, &limit);
    if (index < 0 || !form_known(which, device, *count, entries))
        return result;
    if (which == 0)
        return answer(index, room, count, entries);
    *count = 0; /* the slice's processes are listed as compute processes, so the other lists are empty */
    return result;
}

static nvmlReturn_t list_compute(nvmlDevice_t device, unsigned *count, struct listed *entries)
{
    return list(0, device, count, entries);
}

static nvmlReturn_t list_graphics(nvmlDevice_t device, unsigned *count, struct listed *entries)
{
    return list(1, device, count, entries);
}

static nvmlReturn_t list_mps(nvmlDevice_t device, unsigned *count, struct listed *entries)
{
    return list(2, device, count, entries);
}

/*
 * Returns a copy of `table` with libvgpu's lists (unchanged, if `table` lacks one of the three). Returns `table` itself
 * if its size is wrong, memory is short, or another table was copied before.
 */
static const void *with_ours(const void *table)
{
    static const list_fn mine[LISTS] = {list_compute, list_graphics, list_mps};
    size_t bytes = *(const size_t *)table;
    if (bytes < (ENTRY_MPS + 1) * sizeof(void *) || bytes > TABLE_MAX_BYTES)
        return table;
    pthread_mutex_lock(&copying);
    if (theirs == NULL && (ours = malloc(bytes)) != NULL) {
        memcpy(ours, table, bytes);
        list_fn *lists = (list_fn *)ours + ENTRY_COMPUTE;
        memcpy(originals, lists, sizeof(originals));
        bool whole = originals[0] != NULL && originals[1] != NULL && originals[2] != NULL;
        if (whole)
            memcpy(lists, mine, sizeof(mine));
        theirs = table;
    }
    const void *result = table == theirs ? ours : table;
    pthread_mutex_unlock(&copying);
    return result;
}

VGPU_EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *name)
{
    static const unsigned char known[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                            0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
    nvmlReturn_t result = CALL_NVML(nvmlInternalGetExportTable, table, name);
    if (result == NVML_SUCCESS && table != NULL && *table != NULL && name != NULL &&
        memcmp(name, known, sizeof(known)) == 0 && vgpu_nvml_lease() != NULL)
        *table = with_ours(*table);
    return result;
}

static void reset(void)
{
    pthread_mutex_init(&copying, NULL);
}
VGPU_IN_CHILD(reset);

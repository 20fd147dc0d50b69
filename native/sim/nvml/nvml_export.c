/* nvmlInternalGetExportTable: the undocumented function that every command of nvidia-smi calls first.
 *
 * NVIDIA publishes nothing about it. This file follows observations of nvidia-smi of branches 535 and
 * 550: the arguments that it passes, and its output for each answer. nvidia-smi asks for one table by
 * a 16-byte name. The first word of the table is its size. nvidia-smi accepts NOT_SUPPORTED from an
 * entry. It needs these entries, which have the same numbers in both branches:
 *   23   (bus id, bus id, unsigned *): `topo -m`. 0 PIX, 1 PXB, 2 PHB, 3 NODE, 4 SYS, 4 + n: n NVLinks
 *   72   (device, unsigned *): `dmon` and `pmon`. 0: "Not supported on the device(s)"
 *   145  (device, since, unsigned *count, unsigned *, samples): `pmon`. Only a count of 0 is known
 *   213  (device, unsigned *count, entries): compute processes, for the table, `-q` and queries
 *   214, 215  likewise, graphics and MPS processes
 */
#include "internal.h"

enum {
    ENTRIES = 512,
    ENTRY_TOPOLOGY = 23,
    ENTRY_MONITORING = 72,
    ENTRY_SAMPLES = 145,
    ENTRY_COMPUTE = 213,
    ENTRY_GRAPHICS = 214,
    ENTRY_MPS = 215,
    LEVEL_SYSTEM = 4,
    NAME_BYTES = 4096,
};

struct process {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
    uint64_t unknown;
    char name[NAME_BYTES];
};
_Static_assert(sizeof(struct process) == 4128, "the distance between entries, as observed");

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *name);

static nvmlReturn_t not_supported(void)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

static const struct sim_device *by_bus_id(const struct sim_state *s, const char *text)
{
    unsigned domain, bus, device;
    if (text == NULL || sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3)
        return NULL;
    for (uint32_t i = 0; i < s->device_count; i++) {
        const struct sim_device *d = &s->devices[i];
        if (d->pci_domain == domain && d->pci_bus == bus && d->pci_device == device)
            return d;
    }
    return NULL;
}

static unsigned int level_of(nvmlGpuTopologyLevel_t level)
{
    switch (level) {
    case NVML_TOPOLOGY_INTERNAL:
    case NVML_TOPOLOGY_SINGLE:
        return 0;
    case NVML_TOPOLOGY_MULTIPLE:
        return 1;
    case NVML_TOPOLOGY_HOSTBRIDGE:
        return 2;
    case NVML_TOPOLOGY_NODE:
        return 3;
    default:
        return LEVEL_SYSTEM;
    }
}

static nvmlReturn_t topology(const char *first, const char *second, unsigned int *level)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlInternalTopology", &s));
    const struct sim_device *a = by_bus_id(s, first), *b = by_bus_id(s, second);
    if (a == NULL || b == NULL || level == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t i = (uint32_t)(a - s->devices), j = (uint32_t)(b - s->devices);
    unsigned int links = a->mig_current || b->mig_current ? 0 : s->links[i][j];
    *level = links > 0 ? LEVEL_SYSTEM + links : level_of((nvmlGpuTopologyLevel_t)s->topology[i][j]);
    return NVML_SUCCESS;
}

static nvmlReturn_t monitoring(nvmlDevice_t device, unsigned int *supported)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlInternalMonitoring", device, &c));
    *supported = 1;
    return NVML_SUCCESS;
}

static nvmlReturn_t samples(nvmlDevice_t device, uint64_t since, unsigned int *count)
{
    struct nv_call c;
    (void)since;
    NV_TRY(nv_enter("nvmlInternalSamples", device, &c));
    *count = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t list(nvmlReturn_t (*source)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *), nvmlDevice_t device,
                         unsigned int *count, struct process *out)
{
    nvmlProcessInfo_t found[SIM_MAX_PROCS];
    if (count == NULL || (out == NULL && *count > 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (*count > SIM_MAX_PROCS)
        *count = SIM_MAX_PROCS;
    NV_TRY(source(device, count, found));
    for (unsigned int i = 0; i < *count; i++) {
        out[i] = (struct process){.pid = found[i].pid,
                                  .bytes = found[i].usedGpuMemory,
                                  .gi = found[i].gpuInstanceId,
                                  .ci = found[i].computeInstanceId};
        nvmlSystemGetProcessName(found[i].pid, out[i].name, sizeof(out[i].name));
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t compute(nvmlDevice_t device, unsigned int *count, struct process *out)
{
    return list(nvmlDeviceGetComputeRunningProcesses_v3, device, count, out);
}

static nvmlReturn_t graphics(nvmlDevice_t device, unsigned int *count, struct process *out)
{
    return list(nvmlDeviceGetGraphicsRunningProcesses_v3, device, count, out);
}

static nvmlReturn_t mps(nvmlDevice_t device, unsigned int *count, struct process *out)
{
    return list(nvmlDeviceGetMPSComputeRunningProcesses_v3, device, count, out);
}

union entry {
    uintptr_t size;
    nvmlReturn_t (*none)(void);
    nvmlReturn_t (*topology)(const char *, const char *, unsigned int *);
    nvmlReturn_t (*monitoring)(nvmlDevice_t, unsigned int *);
    nvmlReturn_t (*samples)(nvmlDevice_t, uint64_t, unsigned int *);
    nvmlReturn_t (*processes)(nvmlDevice_t, unsigned int *, struct process *);
};

static union entry g_table[ENTRIES];
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static void fill(void)
{
    for (int i = 1; i < ENTRIES; i++)
        g_table[i].none = not_supported;
    g_table[0].size = sizeof(g_table);
    g_table[ENTRY_TOPOLOGY].topology = topology;
    g_table[ENTRY_MONITORING].monitoring = monitoring;
    g_table[ENTRY_SAMPLES].samples = samples;
    g_table[ENTRY_COMPUTE].processes = compute;
    g_table[ENTRY_GRAPHICS].processes = graphics;
    g_table[ENTRY_MPS].processes = mps;
}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *name)
{
    static const unsigned char known[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                            0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
    if (table == NULL || name == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memcmp(name, known, sizeof(known)) != 0)
        return NVML_ERROR_NOT_FOUND;
    pthread_once(&g_once, fill);
    *table = g_table;
    return NVML_SUCCESS;
}

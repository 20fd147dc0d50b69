/* NVML's start and stop, handles, error texts and versions. */
#include <stdatomic.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static _Atomic int g_init_count;
static struct sim_state *g_state;
static struct nvmlDevice_st g_devices[SIM_MAX_DEVICES];
static struct nvmlDevice_st g_migs[SIM_MAX_DEVICES][SIM_MAX_GIS][SIM_MAX_CIS];
static struct nvmlGpuInstance_st g_gis[SIM_MAX_DEVICES][SIM_MAX_GIS];
static struct nvmlComputeInstance_st g_cis[SIM_MAX_DEVICES][SIM_MAX_GIS][SIM_MAX_CIS];
static pthread_once_t g_tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    for (uint32_t d = 0; d < SIM_MAX_DEVICES; d++) {
        g_devices[d] = (struct nvmlDevice_st){d, SIM_NONE, SIM_NONE};
        for (uint32_t g = 0; g < SIM_MAX_GIS; g++) {
            g_gis[d][g] = (struct nvmlGpuInstance_st){d, g};
            for (uint32_t c = 0; c < SIM_MAX_CIS; c++) {
                g_migs[d][g][c] = (struct nvmlDevice_st){d, (int)g, (int)c};
                g_cis[d][g][c] = (struct nvmlComputeInstance_st){d, g, c};
            }
        }
    }
}

struct sim_state *nv_state(void)
{
    return atomic_load_explicit(&g_init_count, memory_order_acquire) > 0 ? g_state : NULL;
}

nvmlDevice_t nv_device_handle(uint32_t device)
{
    return &g_devices[device];
}

nvmlDevice_t nv_mig_handle(uint32_t device, uint32_t gi, uint32_t ci)
{
    return &g_migs[device][gi][ci];
}

nvmlGpuInstance_t nv_gi_handle(uint32_t device, uint32_t gi)
{
    return &g_gis[device][gi];
}

nvmlComputeInstance_t nv_ci_handle(uint32_t device, uint32_t gi, uint32_t ci)
{
    return &g_cis[device][gi][ci];
}

static bool is_entry(const void *p, const void *table, size_t bytes, size_t each)
{
    uintptr_t at = (uintptr_t)p, base = (uintptr_t)table;
    return at >= base && at < base + bytes && (at - base) % each == 0;
}

nvmlReturn_t nv_enter_system(const char *function, struct sim_state **s)
{
    *s = nv_state();
    if (*s == NULL)
        return NVML_ERROR_UNINITIALIZED;
    return (nvmlReturn_t)sim_fault(*s, function, -1);
}

static nvmlReturn_t enter_device(const char *function, uint32_t device, struct nv_call *call)
{
    if (device >= call->s->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    call->device = device;
    call->d = &call->s->devices[device];
    int fault = sim_fault(call->s, function, (int)device);
    if (fault != 0)
        return (nvmlReturn_t)fault;
    return call->d->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t nv_enter(const char *function, nvmlDevice_t device, struct nv_call *call)
{
    call->s = nv_state();
    if (call->s == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (!is_entry(device, g_devices, sizeof(g_devices), sizeof(*device)) &&
        !is_entry(device, g_migs, sizeof(g_migs), sizeof(*device)))
        return NVML_ERROR_INVALID_ARGUMENT;
    call->gi = device->gi;
    call->ci = device->ci;
    call->mig = device->gi != SIM_NONE;
    NV_TRY(enter_device(function, device->device, call));
    if (call->mig && (!call->d->gis[call->gi].used || !call->d->gis[call->gi].cis[call->ci].used))
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_SUCCESS;
}

nvmlReturn_t nv_enter_physical(const char *function, nvmlDevice_t device, struct nv_call *call)
{
    NV_TRY(nv_enter(function, device, call));
    return call->mig ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nv_enter_gi(const char *function, nvmlGpuInstance_t gi, struct nv_call *call)
{
    call->s = nv_state();
    if (call->s == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (!is_entry(gi, g_gis, sizeof(g_gis), sizeof(*gi)))
        return NVML_ERROR_INVALID_ARGUMENT;
    call->gi = (int)gi->gi;
    call->ci = SIM_NONE;
    NV_TRY(enter_device(function, gi->device, call));
    return call->d->gis[call->gi].used ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nv_enter_ci(const char *function, nvmlComputeInstance_t ci, struct nv_call *call)
{
    call->s = nv_state();
    if (call->s == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (!is_entry(ci, g_cis, sizeof(g_cis), sizeof(*ci)))
        return NVML_ERROR_INVALID_ARGUMENT;
    call->gi = (int)ci->gi;
    call->ci = (int)ci->ci;
    NV_TRY(enter_device(function, ci->device, call));
    const struct sim_gi *g = &call->d->gis[call->gi];
    return g->used && g->cis[call->ci].used ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nv_copy_text(char *to, unsigned int length, const char *text)
{
    if (to == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(to, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

bool nv_is_admin(void)
{
    struct stat st;
    return geteuid() == 0 || (stat(sim_state_path(), &st) == 0 && st.st_uid == geteuid());
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_once(&g_tables_once, fill_tables);
    struct sim_state *s = sim_attach();
    if (s == NULL)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    int fault = sim_fault(s, "nvmlInit", -1);
    if (fault != 0)
        return (nvmlReturn_t)fault;
    g_state = s;
    atomic_fetch_add(&g_init_count, 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    int count = atomic_load(&g_init_count);
    while (count > 0)
        if (atomic_compare_exchange_weak(&g_init_count, &count, count - 1))
            return NVML_SUCCESS;
    return NVML_ERROR_UNINITIALIZED;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const text[] = {"Success",
                                       "Uninitialized",
                                       "Invalid Argument",
                                       "Not Supported",
                                       "Insufficient Permissions",
                                       "Already Initialized",
                                       "Not Found",
                                       "Insufficient Size",
                                       "Insufficient External Power",
                                       "Driver Not Loaded",
                                       "Timeout",
                                       "Interrupt Request Issue",
                                       "NVML Shared Library Not Found",
                                       "Function Not Found",
                                       "Corrupted infoROM",
                                       "GPU is lost",
                                       "GPU requires reset",
                                       "The operating system has blocked the request",
                                       "RM has detected an NVML/RM version mismatch.",
                                       "In use by another client",
                                       "Insufficient Memory",
                                       "No data",
                                       "Vgpu ECC not supported",
                                       "Insufficient Resources",
                                       "Frequency not supported",
                                       "Argument version mismatch",
                                       "Deprecated",
                                       "Not ready",
                                       "GPU not found",
                                       "Invalid state",
                                       "Reset type not supported"};
    if ((unsigned)result < sizeof(text) / sizeof(text[0]))
        return text[result];
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlSystemGetDriverVersion", &s));
    return nv_copy_text(version, length, s->driver_version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlSystemGetNVMLVersion", &s));
    return nv_copy_text(version, length, s->nvml_version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlSystemGetCudaDriverVersion", &s));
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)s->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    struct sim_state *s;
    char path[40], text[512];
    NV_TRY(nv_enter_system("nvmlSystemGetProcessName", &s));
    if (name == NULL || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return NVML_ERROR_NOT_FOUND;
    size_t n = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    text[n] = '\0';
    snprintf(name, length, "%s", text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlDeviceGetCount_v2", &s));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = s->device_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlDeviceGetHandleByIndex_v2", &s));
    if (device == NULL || index >= s->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (s->devices[index].lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = nv_device_handle(index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t find_mig(struct sim_state *s, const char *uuid, nvmlDevice_t *device)
{
    for (uint32_t i = 0; i < s->device_count; i++)
        for (uint32_t g = 0; g < SIM_MAX_GIS; g++)
            for (uint32_t c = 0; s->devices[i].gis[g].used && c < SIM_MAX_CIS; c++) {
                char text[48];
                if (!s->devices[i].gis[g].cis[c].used)
                    continue;
                sim_mig_uuid(&s->devices[i], g, c, text);
                if (strcmp(text, uuid) == 0) {
                    *device = nv_mig_handle(i, g, c);
                    return NVML_SUCCESS;
                }
            }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t found(struct sim_state *s, uint32_t index, nvmlDevice_t *device)
{
    if (s->devices[index].lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = nv_device_handle(index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlDeviceGetHandleByUUID", &s));
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < s->device_count; i++)
        if (strcmp(s->devices[i].uuid, uuid) == 0)
            return found(s, i, device);
    if (strncmp(uuid, "MIG-", 4) == 0)
        return find_mig(s, uuid, device);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    const unsigned char *b;
    NV_SINCE(nv_state(), 580);
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (uuid->version != nvmlUUID_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (uuid->type == NVML_UUID_TYPE_ASCII)
        return nvmlDeviceGetHandleByUUID(uuid->value.str, device);
    if (uuid->type != NVML_UUID_TYPE_BINARY)
        return NVML_ERROR_INVALID_ARGUMENT;
    b = uuid->value.bytes;
    const char *const kinds[] = {"GPU", "MIG"};
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof(text), "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                 kinds[i], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                 b[14], b[15]);
        if (nvmlDeviceGetHandleByUUID(text, device) == NVML_SUCCESS)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlDeviceGetHandleBySerial", &s));
    if (serial == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < s->device_count; i++)
        if (strcmp(s->devices[i].serial, serial) == 0)
            return found(s, i, device);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    struct sim_state *s;
    unsigned domain = 0, bus, number, function = 0;
    NV_TRY(nv_enter_system("nvmlDeviceGetHandleByPciBusId_v2", &s));
    if (bus_id == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &number, &function) < 3) {
        domain = 0;
        if (sscanf(bus_id, "%x:%x.%x", &bus, &number, &function) < 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (uint32_t i = 0; i < s->device_count; i++) {
        const struct sim_device *d = &s->devices[i];
        if (d->pci_domain == domain && d->pci_bus == bus && d->pci_device == number)
            return found(s, i, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

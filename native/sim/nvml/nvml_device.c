/* Properties of a device: names, numbers, PCI, memory, modes. */
#include "internal.h"

NV_GET_TEXT(nvmlDeviceGetSerial, c.d->serial)
NV_GET_TEXT(nvmlDeviceGetVbiosVersion, c.d->vbios)
NV_GET_TEXT(nvmlDeviceGetBoardPartNumber, c.d->board_part)
NV_GET_TEXT(nvmlDeviceGetInforomImageVersion, c.d->inforom_image)
NV_GET_UINT(nvmlDeviceGetMinorNumber, c.d->minor)
NV_GET_UINT(nvmlDeviceGetBoardId, c.d->board_id)
NV_GET_UINT(nvmlDeviceGetMultiGpuBoard, 0)
NV_GET_UINT(nvmlDeviceGetModuleId, c.d->module_id)
NV_GET_UINT(nvmlDeviceGetNumGpuCores, c.d->core_count)
NV_GET_UINT(nvmlDeviceGetMemoryBusWidth, c.d->memory_bus_width_bits)
NV_GET_UINT(nvmlDeviceGetIrqNum, 64 + c.d->minor)
NV_GET_UINT(nvmlDeviceGetMaxPcieLinkGeneration, c.d->pcie_generation)
NV_GET_UINT(nvmlDeviceGetGpuMaxPcieLinkGeneration, c.d->pcie_generation)
NV_GET_UINT(nvmlDeviceGetCurrPcieLinkGeneration, c.d->pcie_generation)
NV_GET_UINT(nvmlDeviceGetMaxPcieLinkWidth, c.d->pcie_width)
NV_GET_UINT(nvmlDeviceGetCurrPcieLinkWidth, c.d->pcie_width)
NV_GET_UINT(nvmlDeviceGetPcieReplayCounter, 0)
NV_NOT_SUPPORTED(nvmlDeviceGetBridgeChipInfo, nvmlBridgeChipHierarchy_t *out)

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetIndex", device, &c));
    if (index == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = c.device;
    for (uint32_t g = 0, n = 0; c.mig && g < SIM_MAX_GIS; g++)
        for (uint32_t i = 0; c.d->gis[g].used && i < SIM_MAX_CIS; i++) {
            if (g == (uint32_t)c.gi && i == (uint32_t)c.ci)
                *index = n;
            n += c.d->gis[g].cis[i].used != 0;
        }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    struct nv_call c;
    char text[192];
    NV_TRY(nv_enter("nvmlDeviceGetName", device, &c));
    if (!c.mig)
        return nv_copy_text(name, length, c.d->name);
    struct sim_ci_profile p;
    const struct sim_gi *g = &c.d->gis[c.gi];
    if (!sim_ci_profile(c.d, g, g->cis[c.ci].profile, &p))
        return NVML_ERROR_UNKNOWN;
    snprintf(text, sizeof(text), "%s %s", c.d->name, p.name);
    return nv_copy_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    struct nv_call c;
    char text[48];
    NV_TRY(nv_enter("nvmlDeviceGetUUID", device, &c));
    if (!c.mig)
        return nv_copy_text(uuid, length, c.d->uuid);
    sim_mig_uuid(c.d, (uint32_t)c.gi, (uint32_t)c.ci, text);
    return nv_copy_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetBrand", device, &c));
    if (brand == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *brand = c.d->brand;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetArchitecture", device, &c));
    if (arch == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *arch = c.d->architecture;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBusType(nvmlDevice_t device, nvmlBusType_t *type)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetBusType", device, &c));
    if (type == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *type = NVML_BUS_TYPE_PCIE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetCudaComputeCapability", device, &c));
    if (major == NULL || minor == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)c.d->cc_major;
    *minor = (int)c.d->cc_minor;
    return NVML_SUCCESS;
}

void nv_pci_info(const struct sim_device *d, nvmlPciInfo_t *pci)
{
    memset(pci, 0, sizeof(*pci));
    pci->domain = d->pci_domain;
    pci->bus = d->pci_bus;
    pci->device = d->pci_device;
    pci->pciDeviceId = d->pci_device_id;
    pci->pciSubSystemId = d->pci_subsystem_id;
    snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, d->pci_domain, d->pci_bus, d->pci_device);
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, d->pci_domain & 0xffff,
             d->pci_bus & 0xff, d->pci_device & 0xff);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPciInfo_v3", device, &c));
    if (pci == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    nv_pci_info(c.d, pci);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPciInfoExt", device, &c));
    NV_SINCE(c.s, 550);
    if (pci == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (pci->version != nvmlPciInfoExt_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    *pci = (nvmlPciInfoExt_t){.version = nvmlPciInfoExt_v1,
                              .domain = c.d->pci_domain,
                              .bus = c.d->pci_bus,
                              .device = c.d->pci_device,
                              .pciDeviceId = c.d->pci_device_id,
                              .pciSubSystemId = c.d->pci_subsystem_id,
                              .baseClass = 3,
                              .subClass = 2};
    snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, c.d->pci_domain, c.d->pci_bus,
             c.d->pci_device);
    return NVML_SUCCESS;
}

struct figures {
    unsigned long long total, reserved, used;
};

static struct figures memory_of(struct nv_call *c)
{
    struct figures m;
    sim_lock(c->s);
    sim_sweep(c->s);
    m.used = sim_used_bytes(c->s, c->device, c->gi);
    m.total = c->mig ? sim_capacity_bytes(c->s, c->device, c->gi) : c->d->memory_total;
    m.reserved = c->mig ? 0 : c->d->memory_reserved;
    if (!c->mig)
        m.used += c->d->hidden_bytes;
    sim_unlock(c->s);
    if (m.used > m.total - m.reserved)
        m.used = m.total - m.reserved;
    return m;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetMemoryInfo", device, &c));
    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct figures m = memory_of(&c);
    memory->total = m.total;
    memory->used = m.used + m.reserved;
    memory->free = m.total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetMemoryInfo_v2", device, &c));
    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    struct figures m = memory_of(&c);
    memory->total = m.total;
    memory->reserved = m.reserved;
    memory->used = m.used;
    memory->free = m.total - m.used - m.reserved;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetBAR1MemoryInfo", device, &c));
    if (bar1 == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    bar1->bar1Total = c.d->bar1_total;
    bar1->bar1Used = UINT64_C(1) << 20;
    bar1->bar1Free = bar1->bar1Total - bar1->bar1Used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetAttributes_v2", device, &c));
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct sim_gi *g = &c.d->gis[c.gi];
    const struct sim_gi_profile *p = &c.d->gi_profiles[g->profile];
    *out = (nvmlDeviceAttributes_t){.multiprocessorCount = g->cis[c.ci].sm_count,
                                    .sharedCopyEngineCount = p->copy_engines,
                                    .sharedDecoderCount = p->decoders,
                                    .sharedEncoderCount = p->encoders,
                                    .sharedJpegCount = p->jpegs,
                                    .sharedOfaCount = p->ofas,
                                    .gpuInstanceSliceCount = p->slice_count,
                                    .computeInstanceSliceCount = g->cis[c.ci].slice_count,
                                    .memorySizeMB = p->memory_mib};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    return nvmlDeviceGetAttributes_v2(device, out);
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetVirtualizationMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = (nvmlGpuVirtualizationMode_t)c.d->virtualization_mode;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetEccMode", device, &c));
    if (current == NULL || pending == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = c.d->ecc ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *count)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetTotalEccErrors", device, &c));
    if (count == NULL || type >= NVML_MEMORY_ERROR_TYPE_COUNT || counter >= NVML_ECC_COUNTER_TYPE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    return NVML_SUCCESS;
}

/* Modes of a device that an administrator can change. */

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetComputeMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = (nvmlComputeMode_t)c.d->compute_mode;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceSetComputeMode", device, &c));
    if (mode >= NVML_COMPUTEMODE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
        return NVML_ERROR_NOT_SUPPORTED; /* CUDA 8 removed this function */
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    c.d->compute_mode = mode;
    sim_unlock(c.s);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetPersistenceMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = (nvmlEnableState_t)c.d->persistence;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceSetPersistenceMode", device, &c));
    if (mode > NVML_FEATURE_ENABLED)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    c.d->persistence = mode;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetAccountingMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = (nvmlEnableState_t)c.d->accounting;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceSetAccountingMode", device, &c));
    if (mode > NVML_FEATURE_ENABLED)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    c.d->accounting = mode;
    return NVML_SUCCESS;
}

NV_GET_UINT(nvmlDeviceGetAccountingBufferSize, 4000)

nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetDisplayMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    return nvmlDeviceGetDisplayMode(device, mode);
}

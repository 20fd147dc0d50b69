/* The place of devices: NUMA, PCI distance, NVLink, peer access. */
#include <unistd.h>

#include "internal.h"

nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetNumaNodeId", device, &c));
    NV_SINCE(c.s, 550);
    if (node == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->numa_node_reported)
        return NVML_ERROR_NOT_SUPPORTED;
    *node = c.d->numa_node;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
                                         nvmlAffinityScope_t scope)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetMemoryAffinity", device, &c));
    if (size == 0 || nodes == NULL || scope > NVML_AFFINITY_SCOPE_SOCKET)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(nodes, 0, size * sizeof(*nodes));
    nodes[0] = 1ul << c.d->numa_node;
    return NVML_SUCCESS;
}

/* The host's processors are split evenly over the NUMA nodes of the profile. */
nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size, unsigned long *cpus,
                                                 nvmlAffinityScope_t scope)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetCpuAffinityWithinScope", device, &c));
    if (size == 0 || cpus == NULL || scope > NVML_AFFINITY_SCOPE_SOCKET)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t nodes = 1, total = (uint32_t)sysconf(_SC_NPROCESSORS_CONF);
    for (uint32_t i = 0; i < c.s->device_count; i++)
        if (c.s->devices[i].numa_node >= nodes)
            nodes = c.s->devices[i].numa_node + 1;
    memset(cpus, 0, size * sizeof(*cpus));
    uint32_t bits = (uint32_t)(8 * sizeof(*cpus)), limit = size * bits;
    for (uint32_t cpu = 0; cpu < total && cpu < limit; cpu++)
        if (cpu * nodes / total == c.d->numa_node)
            cpus[cpu / bits] |= 1ul << (cpu % bits);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *cpus)
{
    return nvmlDeviceGetCpuAffinityWithinScope(device, size, cpus, NVML_AFFINITY_SCOPE_NODE);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2,
                                                 nvmlGpuTopologyLevel_t *level)
{
    struct nv_call a, b;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTopologyCommonAncestor", device1, &a));
    NV_TRY(nv_enter_physical("nvmlDeviceGetTopologyCommonAncestor", device2, &b));
    if (level == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = (nvmlGpuTopologyLevel_t)a.s->topology[a.device][b.device];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned int *count,
                                              nvmlDevice_t *devices)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTopologyNearestGpus", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = devices == NULL ? 0 : *count, n = 0;
    for (uint32_t i = 0; i < c.s->device_count; i++) {
        if (i == c.device || c.s->topology[c.device][i] != (uint8_t)level)
            continue;
        if (n < room)
            devices[n] = nv_device_handle(i);
        n++;
    }
    *count = room == 0 || n < room ? n : room;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2, nvmlGpuP2PCapsIndex_t index,
                                    nvmlGpuP2PStatus_t *status)
{
    struct nv_call a, b;
    NV_TRY(nv_enter_physical("nvmlDeviceGetP2PStatus", device1, &a));
    NV_TRY(nv_enter_physical("nvmlDeviceGetP2PStatus", device2, &b));
    if (status == NULL || index > NVML_P2P_CAPS_INDEX_PCI)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool linked = a.s->links[a.device][b.device] > 0 && !a.d->mig_current && !b.d->mig_current;
    bool over_pci = index == NVML_P2P_CAPS_INDEX_PCI;
    *status = linked && !over_pci ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

static nvmlReturn_t enter_link(const char *function, nvmlDevice_t device, unsigned int link, const void *out,
                               struct nv_call *c)
{
    NV_TRY(nv_enter_physical(function, device, c));
    if (out == NULL || link >= NVML_NVLINK_MAX_LINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    return link < c->d->nvlink_count ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
    struct nv_call c;
    NV_TRY(enter_link("nvmlDeviceGetNvLinkState", device, link, active, &c));
    *active = NVML_FEATURE_DISABLED;
    for (uint32_t i = 0; i < c.s->device_count; i++)
        if (c.s->links[c.device][i] > link)
            *active = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
    struct nv_call c;
    NV_TRY(enter_link("nvmlDeviceGetNvLinkVersion", device, link, version, &c));
    *version = c.d->nvlink_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, nvmlNvLinkCapability_t capability,
                                           unsigned int *result)
{
    struct nv_call c;
    NV_TRY(enter_link("nvmlDeviceGetNvLinkCapability", device, link, result, &c));
    if (capability >= NVML_NVLINK_CAP_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *result = capability != NVML_NVLINK_CAP_SLI_BRIDGE;
    return NVML_SUCCESS;
}

/* All-to-all links go through four switches: each link of a device goes to one of the switches, as on an HGX board. */
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    struct nv_call c;
    NV_TRY(enter_link("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, pci, &c));
    static const struct sim_device first = {.pci_device_id = 0x22A310DE};
    nv_pci_info(&first, pci);
    pci->bus = 5 + link % 4;
    snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, 0u, pci->bus, 0u);
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, 0u, pci->bus & 0xff, 0u);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type)
{
    struct nv_call c;
    NV_TRY(enter_link("nvmlDeviceGetNvLinkRemoteDeviceType", device, link, type, &c));
    *type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
    return NVML_SUCCESS;
}

NV_NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfo, nvmlGpuFabricInfo_t *out)
NV_NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV, nvmlGpuFabricInfoV_t *out)

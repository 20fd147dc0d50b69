/* Devices as the CUDA driver API shows them. */
#include "internal.h"

CUresult cuDeviceGetCount(int *count)
{
    CU_TRY(cu_enter_suspended("cuDeviceGetCount"));
    CU_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    *count = cu.device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *dev, int ordinal)
{
    CU_TRY(cu_enter_suspended("cuDeviceGet"));
    CU_CHECK(ordinal >= 0 && ordinal < cu.device_count, CUDA_ERROR_INVALID_DEVICE);
    CU_CHECK(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    *dev = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetName", dev));
    CU_CHECK(name != NULL && length > 0, CUDA_ERROR_INVALID_VALUE);
    const struct cu_device *d = &cu.devices[dev];
    const struct sim_device *card = cu_sim_device(dev);
    struct sim_ci_profile p;
    if (d->gi != SIM_NONE && sim_ci_profile(card, &card->gis[d->gi], card->gis[d->gi].cis[d->ci].profile, &p))
        snprintf(name, (size_t)length, "%s %s", card->name, p.name);
    else
        snprintf(name, (size_t)length, "%s", card->name);
    return CUDA_SUCCESS;
}

void cu_parse_uuid(const char *text, CUuuid *uuid)
{
    int n = 0;
    for (const char *p = text + 4; *p != '\0' && n < 16;) {
        unsigned byte;
        if (*p == '-') {
            p++;
            continue;
        }
        if (sscanf(p, "%2x", &byte) != 1)
            break;
        uuid->bytes[n++] = (char)byte;
        p += 2;
    }
}

/* Version 1 of the call gives the card's UUID even for a MIG device; version 2 gives the MIG device's own UUID. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetUuid", dev));
    CU_CHECK(uuid != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_parse_uuid(cu_sim_device(dev)->uuid, uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetUuid_v2", dev));
    CU_CHECK(uuid != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct cu_device *d = &cu.devices[dev];
    char text[48];
    if (d->gi == SIM_NONE)
        return cuDeviceGetUuid(uuid, dev);
    sim_mig_uuid(cu_sim_device(dev), (uint32_t)d->gi, (uint32_t)d->ci, text);
    cu_parse_uuid(text, uuid);
    return CUDA_SUCCESS;
}

/* CUDA's total memory does not include the card's reserve, but includes memory that a fault hides. */
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceTotalMem_v2", dev));
    CU_CHECK(bytes != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct cu_device *d = &cu.devices[dev];
    const struct sim_device *card = cu_sim_device(dev);
    *bytes = d->gi == SIM_NONE ? card->memory_total - card->memory_reserved
                               : sim_capacity_bytes(cu.s, d->device, d->gi);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetPCIBusId", dev));
    CU_CHECK(id != NULL && length > 0, CUDA_ERROR_INVALID_VALUE);
    const struct sim_device *card = cu_sim_device(dev);
    snprintf(id, (size_t)length, "%04X:%02X:%02X.0", card->pci_domain, card->pci_bus, card->pci_device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
    unsigned domain, bus, number;
    CU_TRY(cu_enter("cuDeviceGetByPCIBusId"));
    CU_CHECK(dev != NULL && id != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(sscanf(id, "%x:%x:%x", &domain, &bus, &number) == 3, CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < cu.device_count; i++) {
        const struct sim_device *card = cu_sim_device(i);
        if (card->pci_domain == domain && card->pci_bus == bus && card->pci_device == number) {
            *dev = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceComputeCapability", dev));
    CU_CHECK(major != NULL && minor != NULL, CUDA_ERROR_INVALID_VALUE);
    *major = (int)cu_sim_device(dev)->cc_major;
    *minor = (int)cu_sim_device(dev)->cc_minor;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *prop, CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGetProperties", dev));
    CU_CHECK(prop != NULL, CUDA_ERROR_INVALID_VALUE);
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024,
                        .maxThreadsDim = {1024, 1024, 64},
                        .maxGridSize = {2147483647, 65535, 65535},
                        .sharedMemPerBlock = 49152,
                        .totalConstantMemory = 65536,
                        .SIMDWidth = 32,
                        .memPitch = 2147483647,
                        .regsPerBlock = 65536,
                        .clockRate = (int)cu_sim_device(dev)->clock_graphics_mhz * 1000,
                        .textureAlign = 512};
    return CUDA_SUCCESS;
}

static uint32_t links(CUdevice a, CUdevice b)
{
    const struct cu_device *x = &cu.devices[a], *y = &cu.devices[b];
    if (x->gi != SIM_NONE || y->gi != SIM_NONE)
        return 0; /* GPUs in MIG mode have no peer access to each other */
    return cu.s->links[x->device][y->device];
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
    CU_TRY(cu_enter_device("cuDeviceCanAccessPeer", dev));
    CU_TRY(cu_enter_device("cuDeviceCanAccessPeer", peer));
    CU_CHECK(can != NULL, CUDA_ERROR_INVALID_VALUE);
    *can = dev != peer && links(dev, peer) > 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice dev, CUdevice peer)
{
    CU_TRY(cu_enter_device("cuDeviceGetP2PAttribute", dev));
    CU_TRY(cu_enter_device("cuDeviceGetP2PAttribute", peer));
    CU_CHECK(value != NULL && dev != peer, CUDA_ERROR_INVALID_VALUE);
    *value = links(dev, peer) > 0;
    if (attribute == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)
        *value = links(dev, peer) > 0 ? 0 : 1;
    return CUDA_SUCCESS;
}

int cu_multiprocessors(int dev)
{
    /* An MPS client sees its share of the SMs, rounded up to pairs, as on hardware. */
    uint32_t sms = cu_sm_count(dev);
    if (!cu.mps || cu.mps_fraction >= 1.0)
        return (int)sms;
    uint32_t share = ((uint32_t)(sms * cu.mps_fraction + 0.999) + 1) / 2 * 2;
    return (int)(share < 2 ? 2 : share > sms ? sms : share);
}

/* Reads an attribute whose value is in the card's description. Returns false for any other attribute. */
static bool card_attribute(CUdevice_attribute attribute, CUdevice dev, int *value)
{
    const struct sim_device *card = cu_sim_device(dev);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = cu_multiprocessors(dev);
        return true;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = (int)card->cc_major;
        return true;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = (int)card->cc_minor;
        return true;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        *value = (int)card->clock_graphics_mhz * 1000;
        return true;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        *value = (int)card->clock_memory_mhz * 1000;
        return true;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        *value = (int)card->memory_bus_width_bits;
        return true;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *value = (int)card->l2_cache_bytes;
        return true;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = (int)card->multi_processor_threads;
        return true;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = (int)card->shared_memory_per_sm_bytes;
        return true;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = (int)card->shared_memory_optin_bytes;
        return true;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = (int)card->async_engines;
        return true;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = (int)card->pci_bus;
        return true;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        *value = (int)card->pci_device;
        return true;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        *value = (int)card->pci_domain;
        return true;
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        *value = (int)card->ecc;
        return true;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *value = (int)card->compute_mode;
        return true;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        *value = (int)card->numa_node;
        return true;
    default:
        return false;
    }
}

struct fixed {
    CUdevice_attribute attribute;
    int value;
};

/* Attributes with the same value on every card that a profile describes. */
static const struct fixed fixed_attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT, 65000},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH, 2097120},
};

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev)
{
    CU_TRY(cu_enter_suspended("cuDeviceGetAttribute"));
    CU_CHECK(dev >= 0 && dev < cu.device_count, CUDA_ERROR_INVALID_DEVICE);
    CU_CHECK(value != NULL && attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    bool is_clock = attribute == CU_DEVICE_ATTRIBUTE_CLOCK_RATE || attribute == CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE;
    /* an H200 with driver 580.159.04 gives this error */
    CU_CHECK(!is_clock || !cu_checkpointed(), CUDA_ERROR_OPERATING_SYSTEM);
    if (card_attribute(attribute, dev, value))
        return CUDA_SUCCESS;
    *value = 0; /* a feature that the card lacks */
    for (size_t i = 0; i < sizeof(fixed_attributes) / sizeof(fixed_attributes[0]); i++)
        if (fixed_attributes[i].attribute == attribute)
            *value = fixed_attributes[i].value;
    return CUDA_SUCCESS;
}

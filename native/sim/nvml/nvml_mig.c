/* MIG: mode, GPU instances, compute instances, MIG device handles. */
#include "internal.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetMigMode", device, &c));
    if (current == NULL || pending == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = c.d->mig_current;
    *pending = c.d->mig_pending;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    struct nv_call c;
    int status = 0;
    NV_TRY(nv_enter_physical("nvmlDeviceSetMigMode", device, &c));
    if (activation == NULL || mode > NVML_DEVICE_MIG_ENABLE)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    int ret = sim_mig_set_mode(c.s, c.device, mode, &status);
    sim_unlock(c.s);
    *activation = (nvmlReturn_t)status;
    return (nvmlReturn_t)ret;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetMaxMigDeviceCount", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    for (uint32_t i = 0; c.d->mig_current && i < c.d->gi_profile_count; i++)
        if (c.d->gi_profiles[i].instance_count > *count)
            *count = c.d->gi_profiles[i].instance_count;
    return NVML_SUCCESS;
}

static nvmlReturn_t find_profile(struct nv_call *c, unsigned int profile, const struct sim_gi_profile **found)
{
    if (profile >= NVML_GPU_INSTANCE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < c->d->gi_profile_count; i++) {
        if (c->d->gi_profiles[i].nvml_profile == profile) {
            *found = &c->d->gi_profiles[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

/* The fields that all versions of nvmlGpuInstanceProfileInfo_t have. */
#define PROFILE_FIELDS(p)                                                                                      \
    .id = (p)->id, .sliceCount = (p)->slice_count, .instanceCount = (p)->instance_count,                       \
    .multiprocessorCount = (p)->sm_count, .copyEngineCount = (p)->copy_engines, .decoderCount = (p)->decoders, \
    .encoderCount = (p)->encoders, .jpegCount = (p)->jpegs, .ofaCount = (p)->ofas, .memorySizeMB = (p)->memory_mib

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
                                                 nvmlGpuInstanceProfileInfo_t *info)
{
    struct nv_call c;
    const struct sim_gi_profile *p = NULL;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstanceProfileInfo", device, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile, &p));
    *info = (nvmlGpuInstanceProfileInfo_t){PROFILE_FIELDS(p), .isP2pSupported = p->capabilities & 1};
    return NVML_SUCCESS;
}

static nvmlReturn_t fill_versioned(const struct sim_gi_profile *p, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    unsigned int version = info->version;
    nvmlGpuInstanceProfileInfo_v3_t *v3 = (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info;
    if (version == nvmlGpuInstanceProfileInfo_v2)
        *info = (nvmlGpuInstanceProfileInfo_v2_t){PROFILE_FIELDS(p), .isP2pSupported = p->capabilities & 1};
    else if (version == nvmlGpuInstanceProfileInfo_v3)
        *v3 = (nvmlGpuInstanceProfileInfo_v3_t){PROFILE_FIELDS(p), .capabilities = p->capabilities};
    else
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    info->version = version;
    snprintf(version == nvmlGpuInstanceProfileInfo_v3 ? v3->name : info->name, sizeof(info->name), "%s", p->name);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
                                                  nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct nv_call c;
    const struct sim_gi_profile *p = NULL;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstanceProfileInfoV", device, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile, &p));
    return fill_versioned(p, info);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int profile_id,
                                                      nvmlGpuInstanceProfileInfo_v2_t *info);
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int profile_id,
                                                      nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstanceProfileInfoByIdV", device, &c));
    NV_SINCE(c.s, 580);
    const struct sim_gi_profile *p = sim_gi_profile_by_id(c.d, profile_id);
    if (info == NULL || p == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    return fill_versioned(p, info);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int profile_id,
                                                           nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstancePossiblePlacements_v2", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct sim_gi_profile *p = sim_gi_profile_by_id(c.d, profile_id);
    if (p == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = placements == NULL ? 0 : *count;
    *count = p->placement_count;
    if (placements == NULL)
        return NVML_SUCCESS;
    if (room < p->placement_count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < p->placement_count; i++)
        placements[i] = (nvmlGpuInstancePlacement_t){p->placements[i].start, p->placements[i].size};
    return NVML_SUCCESS;
}

/* Version 1 has no buffer size, so the caller's buffer must have an entry for each placement of the profile. */
nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int profile_id,
                                                        nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
    if (count != NULL && placements != NULL)
        *count = SIM_MAX_PLACEMENTS;
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile_id, placements, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int profile_id,
                                                       unsigned int *count)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstanceRemainingCapacity", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct sim_gi_profile *p = sim_gi_profile_by_id(c.d, profile_id);
    if (p == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_lock(c.s);
    *count = sim_gi_remaining(c.d, p);
    sim_unlock(c.s);
    return NVML_SUCCESS;
}

static nvmlReturn_t create_gi(struct nv_call *c, unsigned int profile_id, const nvmlGpuInstancePlacement_t *placement,
                              nvmlGpuInstance_t *out)
{
    uint32_t gi = 0;
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    struct sim_placement at = {0, 0};
    if (placement != NULL)
        at = (struct sim_placement){placement->start, placement->size};
    sim_lock(c->s);
    int ret = sim_gi_create(c->s, c->device, profile_id, placement == NULL ? NULL : &at, &gi);
    sim_unlock(c->s);
    if (ret == NVML_SUCCESS)
        *out = nv_gi_handle(c->device, gi);
    return (nvmlReturn_t)ret;
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *gi)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceCreateGpuInstance", device, &c));
    return create_gi(&c, profile_id, NULL, gi);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profile_id,
                                                      const nvmlGpuInstancePlacement_t *placement,
                                                      nvmlGpuInstance_t *gi)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceCreateGpuInstanceWithPlacement", device, &c));
    return placement == NULL ? NVML_ERROR_INVALID_ARGUMENT : create_gi(&c, profile_id, placement, gi);
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t gi)
{
    struct nv_call c;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceDestroy", gi, &c));
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    int ret = sim_gi_destroy(c.s, c.device, (uint32_t)c.gi);
    sim_unlock(c.s);
    return (nvmlReturn_t)ret;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *gis,
                                       unsigned int *count)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstances", device, &c));
    if (gis == NULL || count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct sim_gi_profile *p = sim_gi_profile_by_id(c.d, profile_id);
    if (p == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0; /* the caller's array has instanceCount entries */
    for (uint32_t i = 0; i < SIM_MAX_GIS; i++)
        if (c.d->gis[i].used && &c.d->gi_profiles[c.d->gis[i].profile] == p)
            gis[(*count)++] = nv_gi_handle(c.device, i);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *gi)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetGpuInstanceById", device, &c));
    if (gi == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    if (id >= SIM_MAX_GIS || !c.d->gis[id].used)
        return NVML_ERROR_NOT_FOUND;
    *gi = nv_gi_handle(c.device, id);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gi, nvmlGpuInstanceInfo_t *info)
{
    struct nv_call c;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetInfo", gi, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct sim_gi *g = &c.d->gis[c.gi];
    info->device = nv_device_handle(c.device);
    info->id = (unsigned int)c.gi;
    info->profileId = c.d->gi_profiles[g->profile].id;
    info->placement = (nvmlGpuInstancePlacement_t){g->placement.start, g->placement.size};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceIsMigDeviceHandle", device, &c));
    if (is_mig == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *is_mig = c.mig;
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_id(struct nv_call *c, int id, unsigned int *out)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    *out = (unsigned int)id;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetGpuInstanceId", device, &c));
    return instance_id(&c, c.gi, id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetComputeInstanceId", device, &c));
    return instance_id(&c, c.ci, id);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", mig, &c));
    if (device == NULL || !c.mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = nv_device_handle(c.device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetMigDeviceHandleByIndex", device, &c));
    if (mig == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!c.d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    for (uint32_t g = 0, n = 0; g < SIM_MAX_GIS; g++) {
        for (uint32_t i = 0; c.d->gis[g].used && i < SIM_MAX_CIS; i++) {
            if (c.d->gis[g].cis[i].used && n++ == index) {
                *mig = nv_mig_handle(c.device, g, i);
                return NVML_SUCCESS;
            }
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

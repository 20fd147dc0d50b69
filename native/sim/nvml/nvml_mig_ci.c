/* Compute instances inside a GPU instance. */
#include "internal.h"

static nvmlReturn_t find_profile(struct nv_call *c, unsigned int profile, unsigned int engines,
                                 struct sim_ci_profile *p)
{
    if (profile >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT || engines >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    return sim_ci_profile(c->d, &c->d->gis[c->gi], profile, p) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* The fields that all versions of nvmlComputeInstanceProfileInfo_t have; `g` is the profile of the GPU instance. */
#define PROFILE_FIELDS(p, g)                                                                                 \
    .id = (p).id, .sliceCount = (p).slice_count, .instanceCount = (p).instance_count,                        \
    .multiprocessorCount = (p).sm_count, .sharedCopyEngineCount = (g)->copy_engines,                         \
    .sharedDecoderCount = (g)->decoders, .sharedEncoderCount = (g)->encoders, .sharedJpegCount = (g)->jpegs, \
    .sharedOfaCount = (g)->ofas

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gi, unsigned int profile,
                                                          unsigned int engines, nvmlComputeInstanceProfileInfo_t *info)
{
    struct nv_call c;
    struct sim_ci_profile p;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstanceProfileInfo", gi, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile, engines, &p));
    const struct sim_gi_profile *g = &c.d->gi_profiles[c.d->gis[c.gi].profile];
    *info = (nvmlComputeInstanceProfileInfo_t){PROFILE_FIELDS(p, g)};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t gi, unsigned int profile,
                                                           unsigned int engines,
                                                           nvmlComputeInstanceProfileInfo_v2_t *info)
{
    struct nv_call c;
    struct sim_ci_profile p;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstanceProfileInfoV", gi, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool v3 = info->version == nvmlComputeInstanceProfileInfo_v3;
    if (!v3 && info->version != nvmlComputeInstanceProfileInfo_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NV_TRY(find_profile(&c, profile, engines, &p));
    const struct sim_gi_profile *g = &c.d->gi_profiles[c.d->gis[c.gi].profile];
    unsigned int version = info->version;
    *info = (nvmlComputeInstanceProfileInfo_v2_t){PROFILE_FIELDS(p, g), .version = version};
    snprintf(info->name, sizeof(info->name), "%s", p.name);
    if (v3) /* version 3 is version 2 with one more field at the end */
        ((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                                unsigned int *count)
{
    struct nv_call c;
    struct sim_ci_profile p;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", gi, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile_id, 0, &p));
    sim_lock(c.s);
    *count = sim_ci_remaining(c.d, &c.d->gis[c.gi], &p);
    sim_unlock(c.s);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                                 nvmlComputeInstancePlacement_t *placements,
                                                                 unsigned int *count)
{
    struct nv_call c;
    struct sim_ci_profile p;
    uint32_t starts[SIM_MAX_CIS];
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstancePossiblePlacements", gi, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile_id, 0, &p));
    unsigned int room = *count;
    *count = sim_ci_placements(&c.d->gi_profiles[c.d->gis[c.gi].profile], p.slice_count, starts);
    if (placements == NULL)
        return NVML_SUCCESS;
    if (room < *count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < *count; i++)
        placements[i] = (nvmlComputeInstancePlacement_t){starts[i], p.slice_count};
    return NVML_SUCCESS;
}

static nvmlReturn_t create_ci(struct nv_call *c, unsigned int profile_id,
                              const nvmlComputeInstancePlacement_t *placement, nvmlComputeInstance_t *out)
{
    uint32_t ci = 0;
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    struct sim_placement at = {0, 0};
    if (placement != NULL)
        at = (struct sim_placement){placement->start, placement->size};
    sim_lock(c->s);
    int ret = sim_ci_create(c->s, c->device, (uint32_t)c->gi, profile_id, placement == NULL ? NULL : &at, &ci);
    sim_unlock(c->s);
    if (ret == NVML_SUCCESS)
        *out = nv_ci_handle(c->device, (uint32_t)c->gi, ci);
    return (nvmlReturn_t)ret;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                  nvmlComputeInstance_t *ci)
{
    struct nv_call c;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceCreateComputeInstance", gi, &c));
    return create_ci(&c, profile_id, NULL, ci);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                               const nvmlComputeInstancePlacement_t *placement,
                                                               nvmlComputeInstance_t *ci)
{
    struct nv_call c;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceCreateComputeInstanceWithPlacement", gi, &c));
    return placement == NULL ? NVML_ERROR_INVALID_ARGUMENT : create_ci(&c, profile_id, placement, ci);
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t ci)
{
    struct nv_call c;
    NV_TRY(nv_enter_ci("nvmlComputeInstanceDestroy", ci, &c));
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    int ret = sim_ci_destroy(c.s, c.device, (uint32_t)c.gi, (uint32_t)c.ci);
    sim_unlock(c.s);
    return (nvmlReturn_t)ret;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                nvmlComputeInstance_t *cis, unsigned int *count)
{
    struct nv_call c;
    struct sim_ci_profile p;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstances", gi, &c));
    if (cis == NULL || count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    NV_TRY(find_profile(&c, profile_id, 0, &p));
    *count = 0;
    for (uint32_t i = 0; i < SIM_MAX_CIS; i++)
        if (c.d->gis[c.gi].cis[i].used && c.d->gis[c.gi].cis[i].profile == profile_id)
            cis[(*count)++] = nv_ci_handle(c.device, (uint32_t)c.gi, i);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gi, unsigned int id, nvmlComputeInstance_t *ci)
{
    struct nv_call c;
    NV_TRY(nv_enter_gi("nvmlGpuInstanceGetComputeInstanceById", gi, &c));
    if (ci == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (id >= SIM_MAX_CIS || !c.d->gis[c.gi].cis[id].used)
        return NVML_ERROR_NOT_FOUND;
    *ci = nv_ci_handle(c.device, (uint32_t)c.gi, id);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info)
{
    struct nv_call c;
    NV_TRY(nv_enter_ci("nvmlComputeInstanceGetInfo_v2", ci, &c));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct sim_ci *i = &c.d->gis[c.gi].cis[c.ci];
    info->device = nv_mig_handle(c.device, (uint32_t)c.gi, (uint32_t)c.ci);
    info->gpuInstance = nv_gi_handle(c.device, (uint32_t)c.gi);
    info->id = (unsigned int)c.ci;
    info->profileId = i->profile;
    info->placement = (nvmlComputeInstancePlacement_t){i->start, i->slice_count};
    return NVML_SUCCESS;
}

/* The structure of version 1 ends before the placement. */
nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info)
{
    nvmlComputeInstanceInfo_t full;
    NV_TRY(nvmlComputeInstanceGetInfo_v2(ci, &full));
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    memcpy(info, &full, offsetof(nvmlComputeInstanceInfo_t, placement));
    return NVML_SUCCESS;
}

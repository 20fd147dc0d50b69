/* Memory limits of control groups (driver branch 615), and what a card reports about necessary repairs. */
#include "internal.h"

/*
 * Structures of nvmlDeviceSetMemoryLimits_v1 and of the query for the same limits: NVML API reference,
 * "nvmlSetMemoryLimits_v1_t".
 */
struct nv_set_limits {
    const char *group;
    unsigned long long soft, hard;
};
struct nv_get_limits {
    const char *group;
    unsigned long long soft, hard, used;
};

int nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, const struct nv_set_limits *limits);
int nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, struct nv_get_limits *limits);

static nvmlReturn_t enter(const char *function, nvmlDevice_t device, struct nv_call *c)
{
    NV_SINCE(nv_state(), 615);
    NV_TRY(nv_enter_physical(function, device, c));
    return c->d->mig_current ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

int nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, const struct nv_set_limits *limits)
{
    struct nv_call c;
    NV_TRY(enter("nvmlDeviceSetMemoryLimits_v1", device, &c));
    if (limits == NULL || limits->group == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!nv_is_admin())
        return NVML_ERROR_NO_PERMISSION;
    sim_lock(c.s);
    int result = sim_wall_set(c.s, c.device, limits->group, limits->soft, limits->hard);
    sim_unlock(c.s);
    return result;
}

int nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, struct nv_get_limits *limits)
{
    struct nv_call c;
    struct sim_wall wall;
    uint64_t used = 0;
    NV_TRY(enter("nvmlDeviceGetMemoryLimits_v1", device, &c));
    if (limits == NULL || limits->group == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_lock(c.s);
    int result = sim_wall_get(c.s, c.device, limits->group, &wall, &used);
    sim_unlock(c.s);
    if (result != NVML_SUCCESS)
        return result;
    limits->soft = wall.soft;
    limits->hard = wall.hard;
    limits->used = used;
    return NVML_SUCCESS;
}

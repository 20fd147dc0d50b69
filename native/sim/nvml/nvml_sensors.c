/* Temperature, power, clocks, and field values. They follow the load; no value is random. */
#include "internal.h"

#define FIELD_PENDING_BANK_REMAPPING 307 /* NVML_FI_DEV_PENDING_BANK_REMAPPING of nvidia-ml-py 13.615 */

static uint32_t load_percent(struct nv_call *c)
{
    sim_engine_lock(c->d);
    sim_engine_advance(c->s, c->d, &c->d->whole);
    uint32_t percent = sim_engine_percent(c->d, &c->d->whole);
    sim_engine_unlock(c->d);
    return percent;
}

static uint32_t temperature_of(struct nv_call *c)
{
    return c->d->temperature_c + load_percent(c) * 35 / 100;
}

static uint32_t power_mw(struct nv_call *c)
{
    return c->d->power_idle_mw +
           (uint32_t)((uint64_t)(c->d->power_limit_mw - c->d->power_idle_mw) * load_percent(c) / 100);
}

NV_GET_UINT(nvmlDeviceGetPowerUsage, power_mw(&c))
NV_GET_UINT(nvmlDeviceGetEnforcedPowerLimit, c.d->power_limit_mw)
NV_GET_UINT(nvmlDeviceGetPowerManagementLimit, c.d->power_limit_mw)
NV_GET_UINT(nvmlDeviceGetPowerManagementDefaultLimit, c.d->power_max_mw)
NV_NOT_SUPPORTED(nvmlDeviceGetFanSpeed, unsigned int *out)
NV_GET_UINT(nvmlDeviceGetNumFans, 0)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *low, unsigned int *high)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPowerManagementLimitConstraints", device, &c));
    if (low == NULL || high == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *low = c.d->power_min_mw;
    *high = c.d->power_max_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTotalEnergyConsumption", device, &c));
    if (energy == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *energy = (unsigned long long)(c.d->whole.busy_ns_total / 1e9 * c.d->power_limit_mw);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temperature)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTemperature", device, &c));
    if (temperature == NULL || sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *temperature = temperature_of(&c);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTemperatureV", device, &c));
    NV_SINCE(c.s, 580);
    if (temperature == NULL || temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    temperature->temperature = (int)temperature_of(&c);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                               unsigned int *temperature)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetTemperatureThreshold", device, &c));
    if (temperature == NULL || threshold >= NVML_TEMPERATURE_THRESHOLD_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    switch (threshold) {
    case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN:
        *temperature = c.d->temperature_shutdown_c;
        return NVML_SUCCESS;
    case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
        *temperature = c.d->temperature_slowdown_c;
        return NVML_SUCCESS;
    case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
        *temperature = c.d->temperature_max_c;
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

static nvmlReturn_t clock_of(struct nv_call *c, nvmlClockType_t type, bool max, unsigned int *clock)
{
    if (clock == NULL || type >= NVML_CLOCK_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool idle = !max && load_percent(c) == 0;
    if (type == NVML_CLOCK_MEM)
        *clock = c->d->clock_memory_mhz;
    else if (type == NVML_CLOCK_VIDEO)
        *clock = idle ? c->d->clock_idle_mhz : c->d->clock_video_mhz;
    else
        *clock = idle ? c->d->clock_idle_mhz : c->d->clock_graphics_mhz;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetClockInfo", device, &c));
    return clock_of(&c, type, false, clock);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetMaxClockInfo", device, &c));
    return clock_of(&c, type, true, clock);
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPerformanceState", device, &c));
    if (state == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *state = NVML_PSTATE_0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *mask)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetCurrentClocksEventReasons", device, &c));
    if (mask == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mask = load_percent(&c) == 0 ? nvmlClocksEventReasonGpuIdle : nvmlClocksEventReasonNone;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *mask)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, mask);
}

static nvmlReturn_t engine_idle(const char *function, nvmlDevice_t device, unsigned int *percent,
                                unsigned int *period_us)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical(function, device, &c));
    if (percent == NULL || period_us == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *percent = 0;
    *period_us = 167000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
    return engine_idle("nvmlDeviceGetEncoderUtilization", device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
    return engine_idle("nvmlDeviceGetDecoderUtilization", device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
    return engine_idle("nvmlDeviceGetJpgUtilization", device, percent, period_us);
}

nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
    return engine_idle("nvmlDeviceGetOfaUtilization", device, percent, period_us);
}

static void fill_field(struct nv_call *c, nvmlFieldValue_t *v)
{
    v->timestamp = (long long)sim_wall_us();
    v->latencyUsec = 0;
    v->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    v->nvmlReturn = NVML_SUCCESS;
    switch (v->fieldId) {
    case NVML_FI_DEV_ECC_CURRENT:
        v->value.uiVal = c->d->ecc;
        break;
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT:
        v->value.uiVal = power_mw(c);
        break;
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        v->value.uiVal = c->d->nvlink_count;
        break;
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        v->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        v->value.ullVal = (unsigned long long)(c->d->whole.busy_ns_total / 1e9 * c->d->power_limit_mw);
        break;
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: /* nvidia-smi 580 shows this field, nvidia-smi 550 does not */
        v->value.uiVal = c->d->recovery_action;
        v->nvmlReturn = sim_branch(c->s) >= 580 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        break;
    case FIELD_PENDING_BANK_REMAPPING:
        v->value.uiVal = c->d->banks_pending;
        v->nvmlReturn = sim_branch(c->s) >= 615 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        break;
    default:
        v->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetFieldValues", device, &c));
    if (count <= 0 || values == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < count; i++)
        fill_field(&c, &values[i]);
    return NVML_SUCCESS;
}

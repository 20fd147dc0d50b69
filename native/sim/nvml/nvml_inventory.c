/* Reports of a healthy card's parts: error counters, firmware, adjustable clocks, links. */
#include "internal.h"

static nvmlReturn_t need_ecc(const char *function, nvmlDevice_t device, struct nv_call *c)
{
    NV_TRY(nv_enter(function, device, c));
    return c->d->ecc ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *count)
{
    struct nv_call c;
    NV_TRY(need_ecc("nvmlDeviceGetMemoryErrorCounter", device, &c));
    if (count == NULL || type >= NVML_MEMORY_ERROR_TYPE_COUNT || counter >= NVML_ECC_COUNTER_TYPE_COUNT ||
        location >= NVML_MEMORY_LOCATION_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (location != NVML_MEMORY_LOCATION_DRAM && location != NVML_MEMORY_LOCATION_SRAM)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    struct nv_call c;
    NV_TRY(need_ecc("nvmlDeviceGetSramEccErrorStatus", device, &c));
    if (status == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (status->version != nvmlEccSramErrorStatus_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    *status = (nvmlEccSramErrorStatus_t){.version = nvmlEccSramErrorStatus_v1};
    return NVML_SUCCESS;
}

/* Ampere and later cards remap rows; earlier cards retire pages. */
static bool remaps_rows(const struct sim_device *d)
{
    return d->ecc && d->architecture >= NVML_DEVICE_ARCH_AMPERE;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failed)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetRemappedRows", device, &c));
    if (correctable == NULL || uncorrectable == NULL || pending == NULL || failed == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!remaps_rows(c.d))
        return NVML_ERROR_NOT_SUPPORTED;
    *correctable = 0;
    *uncorrectable = c.d->rows_remapped;
    *pending = c.d->rows_pending;
    *failed = c.d->rows_failed;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetRowRemapperHistogram", device, &c));
    if (values == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!remaps_rows(c.d))
        return NVML_ERROR_NOT_SUPPORTED;
    *values = (nvmlRowRemapperHistogramValues_t){.max = (unsigned int)(c.d->memory_total >> 26)};
    return NVML_SUCCESS;
}

static nvmlReturn_t retired(const char *function, nvmlDevice_t device, unsigned int *count)
{
    struct nv_call c;
    NV_TRY(need_ecc(function, device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (remaps_rows(c.d))
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                       unsigned long long *addresses)
{
    (void)cause;
    (void)addresses;
    return retired("nvmlDeviceGetRetiredPages", device, count);
}

nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                          unsigned long long *addresses, unsigned long long *times)
{
    (void)cause;
    (void)addresses;
    (void)times;
    return retired("nvmlDeviceGetRetiredPages_v2", device, count);
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    unsigned int count;
    NV_TRY(retired("nvmlDeviceGetRetiredPagesPendingStatus", device, &count));
    if (pending == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *pending = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

/* Firmware */

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetGspFirmwareVersion", device, &c));
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (c.d->architecture < NVML_DEVICE_ARCH_TURING)
        return NVML_ERROR_NOT_SUPPORTED;
    return nv_copy_text(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, c.s->driver_version);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *enabled, unsigned int *by_default)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetGspFirmwareMode", device, &c));
    if (enabled == NULL || by_default == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *enabled = *by_default = c.d->architecture >= NVML_DEVICE_ARCH_TURING;
    return NVML_SUCCESS;
}

/* Object versions as an H200 reports them; those of older cards differ in the digits only. */
nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, nvmlInforomObject_t object, char *version,
                                         unsigned int length)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetInforomVersion", device, &c));
    if (object >= NVML_INFOROM_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (object == NVML_INFOROM_OEM)
        return nv_copy_text(version, length, "2.1");
    if (object == NVML_INFOROM_ECC && c.d->ecc)
        return nv_copy_text(version, length, "7.16");
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_v1_t *info)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetC2cModeInfoV", device, &c));
    NV_SINCE(c.s, 550);
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    info->isC2cEnabled = 0;
    return NVML_SUCCESS;
}

/* Clocks */

static nvmlReturn_t full_clock(const char *function, nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical(function, device, &c));
    if (clock == NULL || type >= NVML_CLOCK_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *clock = type == NVML_CLOCK_MEM     ? c.d->clock_memory_mhz
             : type == NVML_CLOCK_VIDEO ? c.d->clock_video_mhz
                                        : c.d->clock_graphics_mhz;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    return full_clock("nvmlDeviceGetApplicationsClock", device, type, clock);
}

nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    return full_clock("nvmlDeviceGetDefaultApplicationsClock", device, type, clock);
}

nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    return full_clock("nvmlDeviceGetMaxCustomerBoostClock", device, type, clock);
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *clock)
{
    if (id >= NVML_CLOCK_ID_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (id == NVML_CLOCK_ID_CURRENT)
        return nvmlDeviceGetClockInfo(device, type, clock);
    return full_clock("nvmlDeviceGetClock", device, type, clock);
}

static nvmlReturn_t one_of(const char *function, nvmlDevice_t device, unsigned int value, unsigned int *count,
                           unsigned int *values)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical(function, device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = *count;
    *count = 1;
    if (values == NULL || room < 1)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    values[0] = value;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *clocks)
{
    unsigned int clock;
    NV_TRY(full_clock("nvmlDeviceGetSupportedMemoryClocks", device, NVML_CLOCK_MEM, &clock));
    return one_of("nvmlDeviceGetSupportedMemoryClocks", device, clock, count, clocks);
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory, unsigned int *count,
                                                  unsigned int *clocks)
{
    unsigned int clock, known;
    NV_TRY(full_clock("nvmlDeviceGetSupportedGraphicsClocks", device, NVML_CLOCK_MEM, &known));
    if (memory != known)
        return NVML_ERROR_NOT_FOUND;
    NV_TRY(full_clock("nvmlDeviceGetSupportedGraphicsClocks", device, NVML_CLOCK_GRAPHICS, &clock));
    return one_of("nvmlDeviceGetSupportedGraphicsClocks", device, clock, count, clocks);
}

nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *mask)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetSupportedClocksEventReasons", device, &c));
    if (mask == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mask = nvmlClocksEventReasonAll;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *mask)
{
    return nvmlDeviceGetSupportedClocksEventReasons(device, mask);
}

nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *state)
{
    return nvmlDeviceGetPerformanceState(device, state);
}

nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPowerManagementMode", device, &c));
    if (mode == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t policy, nvmlViolationTime_t *time)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetViolationStatus", device, &c));
    if (time == NULL || policy >= NVML_PERF_POLICY_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *time = (nvmlViolationTime_t){.referenceTime = sim_wall_us(), .violationTime = 0};
    return NVML_SUCCESS;
}

/* The simulated card transfers nothing over its link, encodes nothing, and captures no screen. */

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *value)
{
    struct nv_call c;
    NV_TRY(nv_enter_physical("nvmlDeviceGetPcieThroughput", device, &c));
    if (value == NULL || counter >= NVML_PCIE_UTIL_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *value = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessions, unsigned int *fps,
                                       unsigned int *latency)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetEncoderStats", device, &c));
    if (sessions == NULL || fps == NULL || latency == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *sessions = *fps = *latency = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t device, unsigned int *count, nvmlEncoderSessionInfo_t *sessions)
{
    struct nv_call c;
    (void)sessions;
    NV_TRY(nv_enter("nvmlDeviceGetEncoderSessions", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCStats(nvmlDevice_t device, nvmlFBCStats_t *stats)
{
    struct nv_call c;
    NV_TRY(nv_enter("nvmlDeviceGetFBCStats", device, &c));
    if (stats == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *stats = (nvmlFBCStats_t){.sessionsCount = 0};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t device, unsigned int *count, nvmlFBCSessionInfo_t *sessions)
{
    struct nv_call c;
    (void)sessions;
    NV_TRY(nv_enter("nvmlDeviceGetFBCSessions", device, &c));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

/* The machine around the cards */

static nvmlReturn_t none_of(const char *function, unsigned int *count)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system(function, &s));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
    return none_of("nvmlUnitGetCount", count);
}

nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count)
{
    return none_of("nvmlGetExcludedDeviceCount", count);
}

nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *count, nvmlHwbcEntry_t *entries)
{
    (void)entries;
    return none_of("nvmlSystemGetHicVersion", count);
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices)
{
    struct sim_state *s;
    NV_TRY(nv_enter_system("nvmlSystemGetTopologyGpuSet", &s));
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int room = devices == NULL ? 0 : *count, n = 0;
    for (uint32_t i = 0; i < s->device_count; i++) {
        unsigned long mask[16] = {0};
        nvmlDevice_t device = nv_device_handle(i);
        if (cpu >= 8 * sizeof(mask) || nvmlDeviceGetCpuAffinity(device, 16, mask) != NVML_SUCCESS ||
            (mask[cpu / 64] >> (cpu % 64) & 1) == 0)
            continue;
        if (n < room)
            devices[n] = device;
        n++;
    }
    *count = n;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned int length)
{
    struct sim_state *s;
    char text[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    NV_TRY(nv_enter_system("nvmlSystemGetDriverBranch", &s));
    NV_SINCE(s, 580);
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(text, sizeof(text), "r%.*s", (int)strcspn(s->driver_version, "."), s->driver_version);
    return nv_copy_text(info->branch, length < sizeof(text) ? length : sizeof(text), text);
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same)
{
    struct nv_call a, b;
    NV_TRY(nv_enter_physical("nvmlDeviceOnSameBoard", first, &a));
    NV_TRY(nv_enter_physical("nvmlDeviceOnSameBoard", second, &b));
    if (same == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *same = a.device == b.device;
    return NVML_SUCCESS;
}

/* Mbit/s of a lane: 2500, 5000, 8000, 16000, 32000; nvmlDeviceGetPcieLinkMaxSpeed numbers them from 1 */
NV_GET_UINT(nvmlDeviceGetPcieSpeed,
            c.d->pcie_generation < 3 ? 1250u << c.d->pcie_generation : 1000u << c.d->pcie_generation)
NV_GET_UINT(nvmlDeviceGetPcieLinkMaxSpeed, c.d->pcie_generation)

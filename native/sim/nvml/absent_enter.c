#include "absent.h"
#include "internal.h"

static int absent(nvmlReturn_t entered)
{
    return (int)(entered == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : entered);
}

int nv_absent_of_device(const char *function, const void *device)
{
    struct nv_call c;
    return absent(nv_enter(function, (nvmlDevice_t)(uintptr_t)device, &c));
}

int nv_absent_of_instance(const char *function, const void *instance)
{
    struct nv_call c;
    return absent(nv_enter_gi(function, (nvmlGpuInstance_t)(uintptr_t)instance, &c));
}

int nv_absent_of_system(const char *function)
{
    struct sim_state *s;
    return absent(nv_enter_system(function, &s));
}

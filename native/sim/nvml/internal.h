/* Shared by all NVML families: handles, the entry into a call, versioned structures. */
#ifndef VGPU_SIM_NVML_INTERNAL_H
#define VGPU_SIM_NVML_INTERNAL_H

#include <nvml.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "../state/state.h"

/*
 * Handles point into process-local tables with one entry for each possible device and instance. A handle therefore
 * stays valid as long as the process lives, and an invented handle is recognised by its address.
 */
struct nvmlDevice_st {
    uint32_t device;
    int gi, ci; /* SIM_NONE: the physical device */
};
struct nvmlGpuInstance_st {
    uint32_t device, gi;
};
struct nvmlComputeInstance_st {
    uint32_t device, gi, ci;
};

/* The device or instance that one call is about. */
struct nv_call {
    struct sim_state *s;
    struct sim_device *d;
    uint32_t device;
    int gi, ci;
    bool mig;
};

struct sim_state *nv_state(void); /* returns NULL before nvmlInit */
nvmlDevice_t nv_device_handle(uint32_t device);
nvmlDevice_t nv_mig_handle(uint32_t device, uint32_t gi, uint32_t ci);
nvmlGpuInstance_t nv_gi_handle(uint32_t device, uint32_t gi);
nvmlComputeInstance_t nv_ci_handle(uint32_t device, uint32_t gi, uint32_t ci);

nvmlReturn_t nv_enter_system(const char *function, struct sim_state **s);
nvmlReturn_t nv_enter(const char *function, nvmlDevice_t device, struct nv_call *call);
/* Like nv_enter; returns NOT_SUPPORTED for the handle of a MIG device. */
nvmlReturn_t nv_enter_physical(const char *function, nvmlDevice_t device, struct nv_call *call);
nvmlReturn_t nv_enter_gi(const char *function, nvmlGpuInstance_t gi, struct nv_call *call);
nvmlReturn_t nv_enter_ci(const char *function, nvmlComputeInstance_t ci, struct nv_call *call);
nvmlReturn_t nv_copy_text(char *to, unsigned int length, const char *text);
bool nv_is_admin(void); /* true for root and for the user that made the node */
void nv_pci_info(const struct sim_device *d, nvmlPciInfo_t *pci);

#define NV_TRY(expression)                      \
    do {                                        \
        nvmlReturn_t nv_try_ret = (expression); \
        if (nv_try_ret != NVML_SUCCESS)         \
            return nv_try_ret;                  \
    } while (0)

/*
 * Entry of a function that drivers before this branch lack. There a program would not find the symbol; here the
 * function returns FUNCTION_NOT_FOUND.
 */
#define NV_SINCE(state, branch)                                  \
    do {                                                         \
        const struct sim_state *nv_since = (state);              \
        if (nv_since != NULL && sim_branch(nv_since) < (branch)) \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                \
    } while (0)

/* Defines a function that returns one unsigned figure of a physical device. */
#define NV_GET_UINT(function, value)                              \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *out) \
    {                                                             \
        struct nv_call c;                                         \
        NV_TRY(nv_enter_physical(#function, device, &c));         \
        if (out == NULL)                                          \
            return NVML_ERROR_INVALID_ARGUMENT;                   \
        *out = (value);                                           \
        return NVML_SUCCESS;                                      \
    }

#define NV_GET_TEXT(function, value)                                           \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned int length) \
    {                                                                          \
        struct nv_call c;                                                      \
        NV_TRY(nv_enter_physical(#function, device, &c));                      \
        return nv_copy_text(out, length, (value));                             \
    }

/* Defines a function that checks its device and returns NVML_ERROR_NOT_SUPPORTED. */
#define NV_NOT_SUPPORTED(function, parameter)             \
    nvmlReturn_t function(nvmlDevice_t device, parameter) \
    {                                                     \
        (void)out;                                        \
        struct nv_call c;                                 \
        NV_TRY(nv_enter(#function, device, &c));          \
        return NVML_ERROR_NOT_SUPPORTED;                  \
    }

#endif

/* A green context: a part of a device's SMs, with the primary context's memory and objects. */
#ifndef VGPU_SIM_CUDA_GREEN_H
#define VGPU_SIM_CUDA_GREEN_H

#include "internal.h"

enum { CU_SM_WORDS = 4 };

struct cu_sms {
    uint64_t bits[CU_SM_WORDS];
};

struct CUdevResourceDesc_st {
    uint32_t magic;
    int ordinal;
    struct cu_sms sms;
};

struct CUgreenCtx_st {
    uint32_t magic;
    CUcontext view; /* the context that cuCtxFromGreenCtx returns; it ends with the green context */
    unsigned long long id;
    struct cu_sms sms;
    CUgreenCtx next;
};

/* Function of devres.c: writes the resource that stands for `sms`; NULL: for all SMs that the device shows. */
CUresult cu_resource_of(int ordinal, const struct cu_sms *sms, CUdevResource *out, CUdevResourceType type);

#endif

/* Launches. */
#include "api.h"

CUresult PTSZ(cuLaunchKernel)(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                              unsigned int by, unsigned int bz, unsigned int shared_bytes, CUstream stream,
                              void **parameters, void **extra)
{
    (void)extra;
    CU_TRY(cu_enter("cuLaunchKernel"));
    CU_TRY(cu_launch(f, (unsigned int[]){gx, gy, gz}, (unsigned int[]){bx, by, bz}, shared_bytes, own(stream)));
    return cu_hold(f, parameters, own(stream));
}

CUresult PTSZ(cuLaunchKernelEx)(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra)
{
    (void)parameters;
    (void)extra;
    CU_TRY(cu_enter("cuLaunchKernelEx"));
    CU_CHECK(c != NULL, CUDA_ERROR_INVALID_VALUE);
    return cu_launch(f, (unsigned int[]){c->gridDimX, c->gridDimY, c->gridDimZ},
                     (unsigned int[]){c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, own(c->hStream));
}

CUresult PTSZ(cuLaunchCooperativeKernel)(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                                         unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes,
                                         CUstream stream, void **parameters)
{
    int per_sm = 0;
    (void)parameters;
    CU_TRY(cu_enter("cuLaunchCooperativeKernel"));
    CU_TRY(cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, f, (int)(bx * by * bz), shared_bytes));
    unsigned long long most = (unsigned long long)per_sm * cu_sm_count(f->module->ctx->ordinal);
    CU_CHECK((unsigned long long)gx * gy * gz <= most, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    return cu_launch(f, (unsigned int[]){gx, gy, gz}, (unsigned int[]){bx, by, bz}, shared_bytes, own(stream));
}

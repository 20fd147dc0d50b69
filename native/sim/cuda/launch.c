/* A launch occupies the device's engine for a time. */
#include "graph.h"

/* digest() checks after so many words whether the memory that follows was never written */
#define DIGEST_LOOK_WORDS 8192u

static double work_ns(CUfunction f, const struct cu_device *d)
{
    const struct sim_device *card = &cu.s->devices[d->device];
    double us = cu.kernel_us > 0 ? cu.kernel_us : f->module->kernel_us > 0 ? f->module->kernel_us : card->kernel_us;
    if (d->gi != SIM_NONE) /* the duration is for the whole card: an instance has fewer SMs and takes longer */
        us *= (double)card->sm_count / card->gis[d->gi].cis[d->ci].sm_count;
    return us * 1000.0;
}

CUresult cu_launch_check(CUfunction f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared)
{
    unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
    for (int i = 0; i < 3; i++)
        CU_CHECK(grid[i] > 0 && block[i] > 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(grid[0] <= 2147483647 && grid[1] <= 65535 && grid[2] <= 65535 && block[2] <= 64, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(threads <= (unsigned)f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK], CUDA_ERROR_INVALID_VALUE);
    unsigned int limit = (unsigned)f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];
    return shared <= 49152 || shared <= limit ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult capture(CUfunction f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared,
                        CUstream stream)
{
    CUgraphNode node;
    CU_TRY(cu_capture_add(stream, CU_GRAPH_NODE_TYPE_KERNEL, &node));
    node->kernel = (CUDA_KERNEL_NODE_PARAMS){.func = f,
                                             .gridDimX = grid[0],
                                             .gridDimY = grid[1],
                                             .gridDimZ = grid[2],
                                             .blockDimX = block[0],
                                             .blockDimY = block[1],
                                             .blockDimZ = block[2],
                                             .sharedMemBytes = shared};
    return CUDA_SUCCESS;
}

CUresult cu_launch(CUfunction f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared_bytes,
                   CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_CHECK(f != NULL && f->magic == CU_FUNCTION, CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    CU_CHECK(cu_is_function(f) && f->module->ctx == ctx, CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(cu_launch_check(f, grid, block, shared_bytes));
    if (cu_capture_find(stream) != NULL)
        return capture(f, grid, block, shared_bytes, stream);
    struct cu_device *d = cu_device_of(ctx);
    CU_CHECK(!cu.s->devices[d->device].lost, CUDA_ERROR_UNKNOWN);
    uint64_t n = atomic_fetch_add_explicit(&d->launch_count, 1, memory_order_relaxed);
    _Atomic double *slot = &d->launched[n % CU_LAUNCH_DEPTH];
    /* the channel is full: the launch waits for the end of an earlier one, as on a card */
    if (n >= CU_LAUNCH_DEPTH && !cu_reached(ctx, *slot))
        CU_TRY(cu_wait(ctx, *slot));
    position = sim_engine_submit(cu.s, cu.proc, d->use, work_ns(f, d));
    *slot = position;
    cu_stream_advance(stream, ctx, position);
    return CUDA_SUCCESS;
}

static uint64_t mixed(uint64_t x, uint64_t one, uint64_t two)
{
    x = (x ^ x >> 32) * one;
    x = (x ^ x >> 29) * two;
    return x ^ x >> 32;
}

/*
 * Computes what libvgpu's digest kernel computes (libvgpu/residency/digest.c), at the launch. The parameters are an
 * address, a number of units of two words, two seeds, and the address of two sums. Unlike in that kernel, a word of zero
 * adds nothing, so that memory that was never written need not be read.
 */
static CUresult digest(void **parameters)
{
    const uint64_t *words = *(const uint64_t **)parameters[0];
    uint64_t count = 2 * *(uint64_t *)parameters[1];
    uint64_t a = *(uint64_t *)parameters[2], b = *(uint64_t *)parameters[3];
    uint64_t *sums = *(uint64_t **)parameters[4];
    CU_TRY(cu_check_device_range((CUdeviceptr)words, count * sizeof(words[0])));
    CU_TRY(cu_check_device_range((CUdeviceptr)sums, 2 * sizeof(sums[0])));
    for (uint64_t i = 0; i < count; i++) {
        if (i % DIGEST_LOOK_WORDS == 0)
            i += cu_sparse_zeros(words + i, (count - i) * sizeof(words[0])) / sizeof(words[0]);
        if (i == count || words[i] == 0)
            continue;
        sums[0] += mixed(words[i] ^ (a + i * 0x9e3779b97f4a7c15u), 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu);
        sums[1] += mixed(words[i] + b + i * 0xd1342543de82ef95u, 0xff51afd7ed558ccdu, 0xc4ceb9fe1a85ec53u);
    }
    return CUDA_SUCCESS;
}

CUresult cu_hold(CUfunction f, void **parameters, CUstream stream)
{
    CUcontext ctx;
    double position;
    if (f->module->digests)
        return digest(parameters);
    if (!f->module->waits || cu_capture_find(stream) != NULL)
        return CUDA_SUCCESS;
    CU_CHECK(parameters != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    cu_lock();
    CUresult result = cu_hold_add(ctx, parameters, &position);
    if (result == CUDA_SUCCESS)
        cu_stream_advance(stream, ctx, position);
    cu_unlock();
    return result;
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
    CU_TRY(cu_enter("cuLaunchCooperativeKernelMultiDevice"));
    CU_CHECK(list != NULL && count > 0 && flags <= 3, CUDA_ERROR_INVALID_VALUE);
    for (unsigned int i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *one = &list[i];
        CU_CHECK(one->hStream != NULL && one->hStream != CU_STREAM_LEGACY && one->hStream != CU_STREAM_PER_THREAD,
                 CUDA_ERROR_INVALID_VALUE);
    }
    for (unsigned int i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *one = &list[i];
        CU_TRY(cu_launch(one->function, (unsigned int[]){one->gridDimX, one->gridDimY, one->gridDimZ},
                         (unsigned int[]){one->blockDimX, one->blockDimY, one->blockDimZ}, one->sharedMemBytes,
                         one->hStream));
    }
    return CUDA_SUCCESS;
}

#include "commands.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "allocate.h"
#include "session.h"

#define HOLD_PIECE_BYTES (64u << 20)
#define PIECES_MAX 1000000u
#define LARGE_PAGE_BYTES (2u << 20)

static bool plain(const char *family)
{
    return strcmp(family, "alloc") == 0 || strcmp(family, "pitch") == 0 || strcmp(family, "managed") == 0;
}

int command_info(const struct options *options)
{
    int count = 0;
    int status = session_open(options->device);
    if (status != STATUS_OK)
        return status;
    cu.cuDeviceGetCount(&count);
    printf("{\"state\": \"info\", \"count\": %d, ", count);
    print_device(options->device);
    print_end();
    return STATUS_OK;
}

/*
 * Writes into each large page, so that all of the memory is backed. (On the simulator that costs little host memory.)
 */
static CUresult touch(uint64_t pointer, uint64_t bytes)
{
    return cu.cuMemsetD2D8_v2(pointer, LARGE_PAGE_BYTES, 0x5a, 1, (bytes + LARGE_PAGE_BYTES - 1) / LARGE_PAGE_BYTES);
}

/*
 * Allocates pieces, at most PIECES_MAX, until they have `total` bytes or a request is refused. The process keeps the
 * pieces.
 */
static CUresult make_all(const struct options *options, uint64_t total, uint64_t piece_bytes, struct piece *pieces,
                         uint64_t *count)
{
    CUresult result = CUDA_SUCCESS;
    uint64_t made = 0;
    for (*count = 0; made < total && *count < PIECES_MAX; made += piece_bytes, ++*count) {
        struct piece *piece = &pieces[*count];
        uint64_t bytes = total - made < piece_bytes ? total - made : piece_bytes;
        result = piece_make(options->family, bytes, options->device, piece);
        if (result == CUDA_SUCCESS && plain(options->family))
            result = touch(piece->handle, bytes);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return cu.cuCtxSynchronize();
}

static void drop_all(const struct options *options, const struct piece *pieces, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        piece_drop(options->family, &pieces[i]);
}

int command_hold(const struct options *options)
{
    uint64_t count = 0;
    int status = session_open(options->device);
    if (status != STATUS_OK)
        return status;
    struct piece *pieces = calloc(PIECES_MAX, sizeof(*pieces));
    CUresult result = make_all(options, options->bytes, HOLD_PIECE_BYTES, pieces, &count);
    if (result != CUDA_SUCCESS) {
        status = session_error("hold", result);
    } else {
        printf("{\"state\": \"held\", \"held_bytes\": %llu, ", (unsigned long long)options->bytes);
        print_device(options->device);
        print_end();
        wait_as_asked(options);
        result = plain(options->family) && count > 0 ? cu.cuMemsetD8_v2(pieces[0].handle, 1, 1) : CUDA_SUCCESS;
        result = result == CUDA_SUCCESS ? cu.cuCtxSynchronize() : result;
        printf("{\"state\": \"done\", \"result\": \"%s\"", result_name(result));
        print_end();
        status = result == CUDA_SUCCESS ? STATUS_OK : STATUS_FAILED;
    }
    drop_all(options, pieces, count);
    free(pieces);
    return status;
}

int command_fill(const struct options *options)
{
    uint64_t count = 0;
    uint64_t total = 0;
    int status = session_open(options->device);
    if (status != STATUS_OK)
        return status;
    struct piece *pieces = calloc(PIECES_MAX, sizeof(*pieces));
    CUresult result = make_all(options, UINT64_MAX, options->piece_bytes, pieces, &count);
    for (uint64_t i = 0; i < count; i++)
        total += pieces[i].bytes;
    if (!options->keep)
        drop_all(options, pieces, count);
    /* in this line total_bytes is the number of bytes allocated, and not the device's total */
    printf("{\"state\": \"filled\", \"total_bytes\": %llu, \"pieces\": %llu, \"result\": \"%s\", \"pid\": %d",
           (unsigned long long)total, (unsigned long long)count, result_name(result), getpid());
    print_end();
    if (options->keep)
        wait_as_asked(options);
    free(pieces);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? STATUS_OK : STATUS_FAILED;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/*
 * Allocates and frees at random, with many live allocations, to provoke races between processes. With
 * --then-wait-on-stdin the process waits for the end of its standard input after it has made its context.
 */
int command_churn(const struct options *options)
{
    enum { ALIVE = 64 };
    struct piece alive[ALIVE] = {0};
    uint64_t refused = 0;
    unsigned seed = (unsigned)getpid();
    int status = session_open(options->device);
    if (status == STATUS_OK && options->wait_for_stdin) {
        printf("{\"state\": \"ready\", \"pid\": %d", getpid());
        print_end();
        wait_as_asked(options);
    }
    for (uint64_t i = 0; status == STATUS_OK && i < options->rounds; i++) {
        struct piece *piece = &alive[rand_r(&seed) % ALIVE];
        if (piece->bytes != 0) {
            CUresult result = piece_drop(options->family, piece);
            piece->bytes = 0;
            if (result != CUDA_SUCCESS)
                status = session_error("drop", result);
            continue;
        }
        uint64_t bytes = (1 + (uint64_t)rand_r(&seed) % 8) * (options->piece_bytes / 8);
        CUresult result = piece_make(options->family, bytes, options->device, piece);
        if (result != CUDA_SUCCESS)
            piece->bytes = 0;
        if (result == CUDA_ERROR_OUT_OF_MEMORY)
            refused++;
        else if (result != CUDA_SUCCESS)
            status = session_error("make", result);
    }
    for (int i = 0; status == STATUS_OK && i < ALIVE; i++)
        if (alive[i].bytes != 0)
            piece_drop(options->family, &alive[i]);
    /* released explicitly, so that the simulated driver's accounts are balanced too */
    cu.cuDevicePrimaryCtxRelease_v2(options->device);
    printf("{\"state\": \"churned\", \"rounds\": %llu, \"refused\": %llu, \"pid\": %d",
           (unsigned long long)options->rounds, (unsigned long long)refused, getpid());
    print_end();
    return status;
}

/* A kernel that spins for a given number of clocks. */
static const char spin_ptx[] = ".version 6.0\n"
                               ".target sm_50\n"
                               ".address_size 64\n"
                               ".visible .entry spin(.param .u64 clocks)\n"
                               "{\n"
                               "    .reg .pred %p;\n"
                               "    .reg .u64 %start, %now, %limit;\n"
                               "    ld.param.u64 %limit, [clocks];\n"
                               "    mov.u64 %start, %clock64;\n"
                               "again:\n"
                               "    mov.u64 %now, %clock64;\n"
                               "    sub.u64 %now, %now, %start;\n"
                               "    setp.lt.u64 %p, %now, %limit;\n"
                               "    @%p bra again;\n"
                               "    ret;\n"
                               "}\n";

#define SPIN_CLOCKS 100000u /* number of clocks that take some 50 us */
#define LAUNCHES_A_SYNC 20

int command_run(const struct options *options)
{
    CUmodule module;
    CUfunction spin;
    uint64_t clocks = SPIN_CLOCKS;
    uint64_t launches = 0;
    void *parameters[] = {&clocks};
    int status = session_open(options->device);
    if (status != STATUS_OK)
        return status;
    CUresult result = cu.cuModuleLoadData(&module, spin_ptx);
    if (result == CUDA_SUCCESS)
        result = cu.cuModuleGetFunction(&spin, module, "spin");
    double start = now_seconds();
    double seconds = 0;
    while (result == CUDA_SUCCESS && seconds < options->seconds) {
        for (int i = 0; i < LAUNCHES_A_SYNC && result == CUDA_SUCCESS; i++, launches++)
            result = cu.cuLaunchKernel(spin, 132, 1, 1, 128, 1, 1, 0, NULL, parameters, NULL);
        if (result == CUDA_SUCCESS)
            result = cu.cuCtxSynchronize();
        seconds = now_seconds() - start;
    }
    if (result != CUDA_SUCCESS)
        return session_error("run", result);
    printf("{\"state\": \"ran\", \"launches\": %llu, \"seconds\": %.3f, \"launches_per_second\": %.1f, ",
           (unsigned long long)launches, seconds, (double)launches / seconds);
    print_device(options->device);
    print_end();
    return STATUS_OK;
}

int command_ok(const struct options *options)
{
    enum { BYTES = 1 << 20 };
    CUdeviceptr pointer;
    int status = session_open(options->device);
    if (status != STATUS_OK)
        return status;
    CUresult result = cu.cuMemAlloc_v2(&pointer, BYTES);
    if (result != CUDA_SUCCESS)
        return session_error("cuMemAlloc", result);
    unsigned char *copy = calloc(1, BYTES);
    result = cu.cuMemsetD8_v2(pointer, 0x5a, BYTES);
    if (result == CUDA_SUCCESS)
        result = cu.cuMemcpyDtoH_v2(copy, pointer, BYTES);
    bool same = result == CUDA_SUCCESS;
    for (int i = 0; same && i < BYTES; i++)
        same = copy[i] == 0x5a;
    free(copy);
    cu.cuMemFree_v2(pointer);
    printf("{\"state\": \"ok\", \"correct\": %s, \"result\": \"%s\", ", same ? "true" : "false", result_name(result));
    print_device(options->device);
    print_end();
    return same ? STATUS_OK : STATUS_FAILED;
}

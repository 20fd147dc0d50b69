/*
 * memory_bench.c: cost of libvgpu's memory wrappers. One process calls the driver's own function and the wrapper in
 * alternating blocks. Prints, in ns a call, medians and minima of the blocks, and the median difference between
 * neighbouring blocks, which slow drifts of the device do not affect. The output is JSON lines.
 *
 *   memory_bench calls          (with libvgpu preloaded and a lease)
 *   memory_bench start          cuInit and the first context, in ns
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIB (1ull << 20)
#define BLOCKS 240
#define MANY 100000

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

#define CHECK(call)                                                    \
    do {                                                               \
        CUresult result_ = (call);                                     \
        if (result_ != CUDA_SUCCESS) {                                 \
            fprintf(stderr, "%d: %s: %d\n", __LINE__, #call, result_); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

/* The driver's own function, from its symbol table. dlsym would return libvgpu's wrapper. */
static void *own(const char *name)
{
    struct link_map *map = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *hash = NULL;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_STRTAB)
            strings = (const void *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_GNU_HASH)
            hash = (const void *)entry->d_un.d_ptr;
    }
    const uint32_t *buckets = &hash[4 + hash[2] * (sizeof(ElfW(Addr)) / 4)];
    const uint32_t *chain = buckets + hash[0];
    for (uint32_t b = 0; b < hash[0]; b++)
        for (uint32_t i = buckets[b]; i != 0; i++) {
            if (strcmp(strings + symbols[i].st_name, name) == 0)
                return (void *)(map->l_addr + symbols[i].st_value);
            if (chain[i - hash[1]] & 1)
                break;
        }
    fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
}

struct api {
    CUresult (*alloc)(CUdeviceptr *, size_t);
    CUresult (*free)(CUdeviceptr);
    CUresult (*alloc_async)(CUdeviceptr *, size_t, CUstream);
    CUresult (*free_async)(CUdeviceptr, CUstream);
    CUresult (*info)(size_t *, size_t *);
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                       void **, void **);
};
static struct api apis[2];
static CUfunction function;
static CUstream stream;

static void one_alloc(const struct api *api)
{
    CUdeviceptr pointer;
    CHECK(api->alloc(&pointer, MIB));
    CHECK(api->free(pointer));
}

static void one_small(const struct api *api)
{
    CUdeviceptr pointer;
    CHECK(api->alloc(&pointer, 512));
    CHECK(api->free(pointer));
}

static void one_async(const struct api *api)
{
    CUdeviceptr pointer;
    CHECK(api->alloc_async(&pointer, MIB, stream));
    CHECK(api->free_async(pointer, stream));
}

static void one_info(const struct api *api)
{
    size_t free_bytes;
    size_t total;
    CHECK(api->info(&free_bytes, &total));
}

static void one_launch(const struct api *api)
{
    CHECK(api->launch(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

static CUmemoryPool pool;

/* Queries the size of a pool. libvgpu makes this query for stream-ordered allocations, and has no wrapper for it. */
static void one_attribute(const struct api *api)
{
    cuuint64_t bytes;
    (void)api;
    CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes));
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void compare(const char *name, void (*one)(const struct api *), int calls)
{
    double took[2][BLOCKS];
    double added[BLOCKS];
    for (int block = -2; block < 2 * BLOCKS; block++) {
        const struct api *api = &apis[block & 1];
        double start = now_ns();
        for (int i = 0; i < calls; i++)
            one(api);
        double each = (now_ns() - start) / calls;
        CHECK(cuStreamSynchronize(stream));
        if (block >= 0)
            took[block & 1][block / 2] = each;
    }
    for (int i = 0; i < BLOCKS; i++)
        added[i] = took[1][i] - took[0][i];
    qsort(added, BLOCKS, sizeof(double), by_size);
    for (int k = 0; k < 2; k++)
        qsort(took[k], BLOCKS, sizeof(double), by_size);
    printf("{\"figure\": \"%s\", \"driver_median_ns\": %.1f, \"hooked_median_ns\": %.1f, \"driver_min_ns\": %.1f, "
           "\"hooked_min_ns\": %.1f, \"added_median_ns\": %.1f}\n",
           name, took[0][BLOCKS / 2], took[1][BLOCKS / 2], took[0][0], took[1][0], added[BLOCKS / 2]);
    fflush(stdout);
}

static void refusal(void)
{
    double took[BLOCKS];
    CUdeviceptr pointer;
    for (int block = 0; block < BLOCKS; block++) {
        double start = now_ns();
        for (int i = 0; i < 100; i++)
            if (apis[1].alloc(&pointer, 1ull << 40) != CUDA_ERROR_OUT_OF_MEMORY)
                exit(1);
        took[block] = (now_ns() - start) / 100;
    }
    qsort(took, BLOCKS, sizeof(double), by_size);
    printf("{\"figure\": \"refusal\", \"hooked_median_ns\": %.1f, \"hooked_min_ns\": %.1f}\n", took[BLOCKS / 2],
           took[0]);
}

static void calls(void)
{
    static const char *const ptx = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry e(){ ret; }\n";
    static CUdeviceptr many[MANY];
    CUmodule module;
    CUdeviceptr keep;
    apis[0] = (struct api){own("cuMemAlloc_v2"),  own("cuMemFree_v2"),    own("cuMemAllocAsync"),
                           own("cuMemFreeAsync"), own("cuMemGetInfo_v2"), own("cuLaunchKernel")};
    apis[1] = (struct api){cuMemAlloc, cuMemFree, cuMemAllocAsync, cuMemFreeAsync, cuMemGetInfo, cuLaunchKernel};
    printf("{\"figure\": \"hooked\", \"differs\": %d}\n", (void *)apis[0].alloc != (void *)apis[1].alloc);
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&function, module, "e"));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    compare("launch", one_launch, 1000);
    compare("alloc_free_1MiB", one_alloc, 60);
    compare("alloc_free_512B", one_small, 60);
    CHECK(cuMemAllocAsync(&keep, MIB, stream)); /* while this allocation lives, the pool does not shrink */
    compare("alloc_free_async_1MiB", one_async, 1000);
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    compare("pool_attribute", one_attribute, 1000);
    compare("mem_get_info", one_info, 300);
    refusal();
    for (int i = 0; i < MANY; i++)
        CHECK(cuMemAlloc(&many[i], 512));
    compare("alloc_free_1MiB_with_100000_live", one_alloc, 60);
    compare("alloc_free_async_1MiB_with_100000_live", one_async, 1000);
}

int main(int argc, char **argv)
{
    CUcontext context;
    double start = now_ns();
    CHECK(cuInit(0));
    double initialised = now_ns();
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    double made = now_ns();
    CHECK(cuCtxSetCurrent(context));
    if (argc > 1 && strcmp(argv[1], "calls") == 0)
        calls();
    else
        printf("{\"figure\": \"start\", \"init_ns\": %.0f, \"context_ns\": %.0f}\n", initialised - start,
               made - initialised);
    return 0;
}

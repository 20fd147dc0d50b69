/* Page-locked host memory, which uses no device memory. */
#include <sys/mman.h>

#include "internal.h"

enum { BUCKETS = 4096 };

struct node {
    struct cu_host host;
    struct node *next;
};

static struct node *g_buckets[BUCKETS];
static uint32_t g_count;

static struct node **bucket_of(const void *p)
{
    return &g_buckets[((uintptr_t)p >> 12) * 0x9E3779B97F4A7C15u >> 52 & (BUCKETS - 1)];
}

static struct node **slot_of(const void *base)
{
    struct node **at = bucket_of(base);
    while (*at != NULL && (*at)->host.base != base)
        at = &(*at)->next;
    return at;
}

struct cu_host *cu_host_at(const void *p)
{
    struct node *exact = *slot_of(p);
    if (exact != NULL || g_count == 0)
        return exact == NULL ? NULL : &exact->host;
    /* searches for an address inside a block: this is rare, and there are few blocks */
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct node *n = g_buckets[i]; n != NULL; n = n->next)
            if ((uintptr_t)p - (uintptr_t)n->host.base < n->host.size)
                return &n->host;
    return NULL;
}

static CUresult add(struct cu_host host)
{
    struct node *n = malloc(sizeof(*n));
    CU_CHECK(n != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    struct node **bucket = bucket_of(host.base);
    *n = (struct node){host, *bucket};
    *bucket = n;
    g_count++;
    return CUDA_SUCCESS;
}

static void drop(struct node **at)
{
    struct node *n = *at;
    *at = n->next;
    g_count--;
    free(n);
}

static CUresult allocate(const char *function, void **out, size_t size, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context(function, &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(out != NULL && size > 0, CUDA_ERROR_INVALID_VALUE);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CU_CHECK(p != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    cu_lock();
    CUresult result = add((struct cu_host){p, size, flags, false, ctx});
    cu_unlock();
    if (result == CUDA_SUCCESS)
        *out = p;
    else
        munmap(p, size);
    return result;
}

CUresult cuMemAllocHost_v2(void **out, size_t size)
{
    return allocate("cuMemAllocHost_v2", out, size, CU_MEMHOSTALLOC_DEVICEMAP);
}

CUresult cuMemHostAlloc(void **out, size_t size, unsigned int flags)
{
    return allocate("cuMemHostAlloc", out, size, flags);
}

CUresult cuMemFreeHost(void *p)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMemFreeHost", &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_TRY(cu_wait(ctx, ctx->position));
    cu_lock();
    struct node **at = slot_of(p);
    bool good = *at != NULL && !(*at)->host.registered;
    if (good) {
        munmap(p, (*at)->host.size);
        drop(at);
    }
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned int flags)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMemHostRegister_v2", &ctx));
    CU_TRY(cu_capture_unsafe());
    CU_CHECK(p != NULL && size > 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (cu_host_at(p) == NULL)
        result = add((struct cu_host){p, size, flags, true, ctx});
    cu_unlock();
    return result;
}

CUresult cuMemHostUnregister(void *p)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuMemHostUnregister", &ctx));
    CU_TRY(cu_capture_unsafe());
    cu_lock();
    struct node **at = slot_of(p);
    bool good = *at != NULL && (*at)->host.registered;
    if (good)
        drop(at);
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned int flags)
{
    CU_TRY(cu_enter("cuMemHostGetDevicePointer_v2"));
    CU_CHECK(out != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    const struct cu_host *h = cu_host_at(p);
    cu_unlock();
    CU_CHECK(h != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *p)
{
    CU_TRY(cu_enter("cuMemHostGetFlags"));
    cu_lock();
    const struct cu_host *h = cu_host_at(p);
    unsigned int found = h == NULL ? 0 : h->flags;
    cu_unlock();
    CU_CHECK(h != NULL && flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = found;
    return CUDA_SUCCESS;
}

#include "hostbuf.h"

#include <linux/mempolicy.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "functions.h"
#include "thread.h"

#define SEGMENTS 2048u
#define GRAIN_BYTES (32ull << 20)
#define HELPERS 8
#define TOUCH_BYTES 4096u
#define STACK_BYTES (64 * 1024)
#define NODES 1024
#define NODES_OF_WORD (8 * (int)sizeof(unsigned long))

static struct segment {
    char *base;
    uint64_t offset;
    uint64_t bytes;
    bool locked;
} segments[SEGMENTS];
static unsigned count;

#define PAGES (SEGMENTS * (VGPU_HOSTBUF_STEP_BYTES / VGPU_HOSTBUF_PAGE_BYTES))
static uint64_t owned[PAGES / 64]; /* a bit for each page that has an owner */
static uint64_t owned_count;
_Static_assert(GRAIN_BYTES % VGPU_HOSTBUF_PAGE_BYTES == 0, "a segment has whole pages");

struct part {
    char *base;
    uint64_t bytes;
};

static void *touch(void *argument)
{
    const struct part *part = argument;
    for (uint64_t at = 0; at < part->bytes; at += TOUCH_BYTES)
        *(volatile char *)(part->base + at) = 0;
    return NULL;
}

/*
 * Touches the pages, because the kernel clears a page when it is first touched. It uses as many threads as there are
 * processors, up to HELPERS.
 */
static void touch_all(char *base, uint64_t bytes)
{
    pthread_t threads[HELPERS];
    struct part parts[HELPERS];
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned helpers = processors < 1 ? 1 : processors > HELPERS ? HELPERS : (unsigned)processors;
    bool made[HELPERS] = {false};
    uint64_t each = bytes / helpers / VGPU_HOSTBUF_PAGE_BYTES * VGPU_HOSTBUF_PAGE_BYTES;
    for (unsigned i = 0; i < helpers; i++) {
        parts[i] = (struct part){base + i * each, i + 1 == helpers ? bytes - i * each : each};
        made[i] = i + 1 < helpers && vgpu_thread_start(touch, &parts[i], STACK_BYTES, &threads[i]);
        if (!made[i])
            touch(&parts[i]);
    }
    for (unsigned i = 0; i < helpers; i++)
        if (made[i])
            pthread_join(threads[i], NULL);
}

static CUresult lock_segment(struct segment *segment)
{
    CUresult result = CALL(cuMemHostRegister_v2, segment->base, segment->bytes, CU_MEMHOSTREGISTER_PORTABLE);
    segment->locked = result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return segment->locked ? CUDA_SUCCESS : result;
}

/*
 * Makes the kernel place these pages on the device's NUMA node if it can. If the system call fails (for example,
 * because of a container's seccomp filter), the kernel chooses the node.
 */
static void prefer_node(char *base, uint64_t bytes)
{
    CUdevice device;
    unsigned long nodes[NODES / NODES_OF_WORD] = {0};
    int node = -1;
    if (CALL(cuCtxGetDevice, &device) != CUDA_SUCCESS ||
        CALL(cuDeviceGetAttribute, &node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) != CUDA_SUCCESS || node < 0 ||
        node >= NODES)
        return;
    nodes[node / NODES_OF_WORD] = 1ul << node % NODES_OF_WORD;
    syscall(SYS_mbind, base, bytes, MPOL_PREFERRED, nodes, (unsigned long)NODES, 0);
}

static CUresult add(uint64_t bytes)
{
    if (count == SEGMENTS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct segment *segment = &segments[count];
    *segment = (struct segment){.base = base, .offset = vgpu_hostbuf_bytes(), .bytes = bytes};
    (void)madvise(base, bytes, MADV_HUGEPAGE);
    (void)madvise(base, bytes, MADV_DONTFORK);
    prefer_node(base, bytes);
    touch_all(base, bytes);
    CUresult result = lock_segment(segment);
    if (result != CUDA_SUCCESS)
        munmap(base, bytes);
    else
        count++;
    return result;
}

uint64_t vgpu_hostbuf_bytes(void)
{
    return count == 0 ? 0 : segments[count - 1].offset + segments[count - 1].bytes;
}

uint64_t vgpu_hostbuf_free(void)
{
    return vgpu_hostbuf_bytes() / VGPU_HOSTBUF_PAGE_BYTES - __atomic_load_n(&owned_count, __ATOMIC_ACQUIRE);
}

bool vgpu_hostbuf_take(uint32_t *page)
{
    uint64_t pages = vgpu_hostbuf_bytes() / VGPU_HOSTBUF_PAGE_BYTES;
    for (; *page < pages; ++*page) {
        uint64_t bit = 1ull << *page % 64;
        if ((__atomic_fetch_or(&owned[*page / 64], bit, __ATOMIC_ACQUIRE) & bit) == 0) {
            __atomic_fetch_add(&owned_count, 1, __ATOMIC_RELAXED);
            return true;
        }
    }
    return false;
}

void vgpu_hostbuf_give(uint32_t page)
{
    __atomic_fetch_and(&owned[page / 64], ~(1ull << page % 64), __ATOMIC_RELEASE);
    __atomic_fetch_sub(&owned_count, 1, __ATOMIC_RELEASE);
}

CUresult vgpu_hostbuf_grow(uint64_t bytes)
{
    CUresult result = CUDA_SUCCESS;
    while (result == CUDA_SUCCESS && vgpu_hostbuf_bytes() < bytes) {
        uint64_t left = bytes - vgpu_hostbuf_bytes();
        uint64_t whole = (left + GRAIN_BYTES - 1) / GRAIN_BYTES * GRAIN_BYTES;
        result = add(whole < VGPU_HOSTBUF_STEP_BYTES ? whole : VGPU_HOSTBUF_STEP_BYTES);
    }
    return result;
}

static struct segment *segment_at(uint64_t offset)
{
    unsigned low = 0;
    for (unsigned high = count; high - low > 1;) {
        unsigned middle = low + (high - low) / 2;
        if (segments[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return &segments[low];
}

void *vgpu_hostbuf_at(uint64_t offset, uint64_t *bytes)
{
    const struct segment *segment = segment_at(offset);
    *bytes = segment->offset + segment->bytes - offset;
    return segment->base + (offset - segment->offset);
}

void vgpu_hostbuf_lock_at(uint64_t offset)
{
    struct segment *segment = segment_at(offset);
    if (!segment->locked)
        (void)lock_segment(segment);
}

void vgpu_hostbuf_unlock(void)
{
    for (unsigned i = 0; i < count; i++)
        if (segments[i].locked)
            segments[i].locked = CALL(cuMemHostUnregister, segments[i].base) != CUDA_SUCCESS;
}

CUresult vgpu_hostbuf_lock(void)
{
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        if (!segments[i].locked)
            result = lock_segment(&segments[i]);
    return result;
}

void vgpu_hostbuf_unlocked(void)
{
    for (unsigned i = 0; i < count; i++)
        segments[i].locked = false;
}

/* Called in a forked child, which does not have the segments. */
void vgpu_hostbuf_reset(void)
{
    count = 0;
    memset(owned, 0, sizeof(owned));
    owned_count = 0;
}

#include "inside.h"
#include "in_child.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

__thread struct vgpu_inside *vgpu_inside_own __attribute__((tls_model("initial-exec")));

static struct vgpu_inside *records;
/*
 * record that is shared by all threads which can have none of their own; after the first call of such a thread it
 * always counts as inside
 */
static struct vgpu_inside spare = {.depth = 1, .owned = 1};
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_key;
static bool has_barrier;

/* Called when a thread ends. Its record keeps its count, because the count is part of the process's sum. */
static void thread_ended(void *record)
{
    struct vgpu_inside *own = record;
    vgpu_inside_own = NULL;
    __atomic_store_n(&own->depth, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&own->owned, 0, __ATOMIC_RELEASE);
}

static void start(void)
{
    has_key = pthread_key_create(&key, thread_ended) == 0;
    has_barrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0) == 0;
}

static struct vgpu_inside *take_free(void)
{
    for (struct vgpu_inside *r = __atomic_load_n(&records, __ATOMIC_ACQUIRE); r != NULL; r = r->next) {
        uint32_t none = 0;
        if (__atomic_compare_exchange_n(&r->owned, &none, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return r;
    }
    return NULL;
}

struct vgpu_inside *vgpu_inside_first(void)
{
    pthread_once(&once, start);
    struct vgpu_inside *own = has_key ? take_free() : NULL;
    if (own == NULL && has_key && (own = calloc(1, sizeof(*own))) != NULL) {
        own->owned = 1;
        own->next = __atomic_load_n(&records, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&records, &own->next, own, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            continue;
    }
    if (own == NULL || pthread_setspecific(key, own) != 0)
        own = &spare;
    vgpu_inside_own = own;
    return own;
}

uint64_t vgpu_inside_launches(void)
{
    uint64_t launches = __atomic_load_n(&spare.launches, __ATOMIC_RELAXED);
    for (const struct vgpu_inside *r = __atomic_load_n(&records, __ATOMIC_ACQUIRE); r != NULL; r = r->next)
        launches += __atomic_load_n(&r->launches, __ATOMIC_RELAXED);
    return launches;
}

uint64_t vgpu_inside_glance(bool *inside)
{
    uint64_t calls = spare.calls;
    *inside = calls != 0;
    for (const struct vgpu_inside *r = __atomic_load_n(&records, __ATOMIC_ACQUIRE); r != NULL; r = r->next) {
        *inside |= __atomic_load_n(&r->depth, __ATOMIC_ACQUIRE) != 0;
        calls += __atomic_load_n(&r->calls, __ATOMIC_RELAXED);
    }
    return calls;
}

uint64_t vgpu_inside_read(bool *inside)
{
    pthread_once(&once, start);
    if (has_barrier)
        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0);
    return vgpu_inside_glance(inside);
}

/* Resets the records in a forked child, which has one thread that is in no call. */
static void reset(void)
{
    for (struct vgpu_inside *r = records; r != NULL; r = r->next) {
        r->depth = 0;
        r->owned = r == vgpu_inside_own;
    }
    if (has_barrier)
        has_barrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0) == 0;
}
VGPU_IN_CHILD(reset);

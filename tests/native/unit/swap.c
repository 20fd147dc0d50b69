/*
 * swap.c: what the swap thread reports of a process whose memory is out (residency/swap.c), with functions in place of
 * the eviction's. The process is never reported as ready for the driver while its buffers are page-locked. Exit status
 * 0: all passed.
 */
#include "residency/swap.c"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

#define ALL_BYTES ((uint64_t)VGPU_SHARE_ALL << 20)

void *vgpu_reals[VGPU_FUNCTIONS];
struct vgpu_suspended_words vgpu_suspended;
static struct vgpu_limits page = {.memory = VGPU_MEMORY_OUT, .keep_share = VGPU_SHARE_ALL / 2};
static struct vgpu_slot own;
static uint64_t here = ALL_BYTES;
static bool locked;
static bool fails; /* evictions fail */

static bool says_ready(void)
{
    return (own.swap_phase & VGPU_SWAP_READY) != 0;
}

bool vgpu_evict_out(uint64_t kept)
{
    if (here <= kept)
        return true;
    CHECK(!says_ready());
    locked = true;
    here = fails ? here : kept;
    return !fails;
}

void vgpu_evict_ready(void)
{
    locked = false;
}

struct vgpu_evict_bytes vgpu_evict_count(void)
{
    return (struct vgpu_evict_bytes){.all = ALL_BYTES, .here = here};
}

CUresult vgpu_evict_error(void)
{
    return CUDA_ERROR_UNKNOWN;
}

uint32_t vgpu_suspended_state(void)
{
    return VGPU_LEASE_SUSPENDED;
}

bool vgpu_thread_start(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread)
{
    (void)body, (void)argument, (void)stack_bytes, (void)thread;
    return true; /* the test does what the swap thread does */
}

/* --- the rest of libvgpu, which has nothing to do here */

int vgpu_captures;
uint64_t vgpu_overhead_moves;

void *vgpu_real_found(enum vgpu_function_id id)
{
    (void)id;
    return NULL;
}

bool vgpu_evict_in(bool (*stop)(void))
{
    (void)stop;
    return true;
}

bool vgpu_evict_prepare(uint64_t bytes)
{
    (void)bytes;
    return false;
}

struct vgpu_allocation *vgpu_allocations(void)
{
    return NULL;
}

uint32_t vgpu_parked_behind(void)
{
    return 0;
}

void vgpu_parked_end(void)
{
}

void vgpu_evict_stop(void)
{
}

void vgpu_evict_go_on(void)
{
}

void vgpu_evict_park(void)
{
}

void vgpu_suspended_follow(void)
{
}

void vgpu_suspended_wait(void)
{
}

void vgpu_evict_forget(CUcontext context)
{
    (void)context;
}

void vgpu_evict_start(uint64_t *host_bytes, uint32_t *swap_phase)
{
    (void)host_bytes, (void)swap_phase;
}

void vgpu_channels_stays(const uint64_t by_kind[VGPU_STAY_KINDS])
{
    (void)by_kind;
}

void vgpu_sources_add(uint64_t by_kind[VGPU_STAY_KINDS])
{
    (void)by_kind;
}

void vgpu_table_purge(bool (*match)(const struct vgpu_entry *entry, void *argument), void *argument)
{
    (void)match, (void)argument;
}

/* One look of the swap thread at the lease. */
static void look(void)
{
    if (is_behind())
        shrink();
}

static void check(bool is_ready, uint64_t here_bytes)
{
    uint32_t kept = (uint32_t)(here_bytes >> 20) << VGPU_SWAP_KEPT_SHIFT;
    CHECK(own.swap_phase == (VGPU_SWAP_OUT | kept | (is_ready ? VGPU_SWAP_READY : 0)));
    CHECK(!is_ready || !locked);
}

int main(void)
{
    start(&page, &own);
    follow(true);
    go();
    check(false, ALL_BYTES / 2);
    CHECK(locked);
    fails = true;
    page.keep_share = 0;
    look();
    check(false, ALL_BYTES / 2);
    for (unsigned i = 0; i < 2; i++) {
        page.saves = VGPU_SAVES_REST;
        look();
        check(true, ALL_BYTES / 2);
        CHECK(!is_behind()); /* the driver may be saving the process now */
        page.saves = VGPU_SAVES_NOTHING;
        look();
        check(false, ALL_BYTES / 2);
    }
    fails = false;
    look();
    check(false, 0);
    CHECK(!is_behind());
    return puts("ok") < 0;
}

#include "away.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "in_child.h"

#define LOOK_NS 100000000 /* nobody may be there to say that the lease is back */

struct vgpu_away_words vgpu_away;

static const struct vgpu_limits *limits;
static struct vgpu_slot *slot;
static uint32_t epoch; /* futex: moves when the lease comes back */

/* The linker's names for the section's ends. */
extern const struct vgpu_away_listener *const __start_vgpu_away_listeners[] __attribute__((visibility("hidden")));
extern const struct vgpu_away_listener *const __stop_vgpu_away_listeners[] __attribute__((visibility("hidden")));

static void tell_start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    for (const struct vgpu_away_listener *const *to = __start_vgpu_away_listeners; to < __stop_vgpu_away_listeners;
         to++)
        (*to)->start(page, own);
}

static void tell_answer(bool quiet)
{
    for (const struct vgpu_away_listener *const *to = __start_vgpu_away_listeners; to < __stop_vgpu_away_listeners;
         to++)
        (*to)->follow(quiet);
}

uint32_t vgpu_away_state(void)
{
    return limits == NULL ? 0 : __atomic_load_n(&limits->state, __ATOMIC_ACQUIRE);
}

bool vgpu_away_now(void)
{
    return vgpu_away_state() == VGPU_LEASE_AWAY || vgpu_away_held();
}

static void (*on_work)(void);

void vgpu_away_on_work(void (*say)(void))
{
    __atomic_store_n(&on_work, say, __ATOMIC_RELEASE);
}

static void say_work(void)
{
    void (*say)(void) = __atomic_load_n(&on_work, __ATOMIC_ACQUIRE);
    if (say != NULL)
        say();
}

static uint32_t set_bit(uint32_t bit, bool to)
{
    uint32_t before = to ? __atomic_fetch_or(&vgpu_away.away, bit, __ATOMIC_SEQ_CST)
                         : __atomic_fetch_and(&vgpu_away.away, ~bit, __ATOMIC_SEQ_CST);
    return before & bit;
}

void vgpu_away_set(uint32_t bit, bool to)
{
    set_bit(bit, to);
}

struct vgpu_inside *vgpu_away_enter(void)
{
    for (;;) {
        uint32_t bits = __atomic_load_n(&vgpu_away.away, __ATOMIC_ACQUIRE);
        if ((bits & (VGPU_AWAY_LEASE | VGPU_AWAY_IDLE)) != 0)
            vgpu_away_wait();
        if ((bits & VGPU_AWAY_CUT) == 0)
            return NULL;
        struct vgpu_inside *own = vgpu_inside_enter();
        if ((__atomic_load_n(&vgpu_away.away, __ATOMIC_ACQUIRE) & (VGPU_AWAY_LEASE | VGPU_AWAY_IDLE)) == 0)
            return own;
        vgpu_inside_leave(&own); /* it counted as idle in between, maybe: so this call is said */
    }
}

/* A thread that waits for the lease is not in the driver, though its call has begun. */
static uint32_t step_out(void)
{
    uint32_t depth = vgpu_inside_own != NULL ? vgpu_inside_own->depth : 0;
    if (depth > 0)
        __atomic_store_n(&vgpu_inside_own->depth, 0, __ATOMIC_RELEASE);
    return depth;
}

static void step_in(uint32_t depth)
{
    if (depth > 0)
        __atomic_store_n(&vgpu_inside_own->depth, depth, __ATOMIC_RELAXED);
}

void vgpu_away_follow(void)
{
    bool away = vgpu_away_now();
    bool before = set_bit(VGPU_AWAY_LEASE, away) != 0;
    if (before && !away) {
        __atomic_store_n(&slot->quiet, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&epoch, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
}

void vgpu_away_wait(void)
{
    struct timespec most = {.tv_nsec = LOOK_NS};
    if (!vgpu_away_now()) {
        uint32_t bits = __atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED);
        if ((bits & VGPU_AWAY_LEASE) != 0)
            vgpu_away_follow();
        if ((bits & VGPU_AWAY_IDLE) != 0)
            say_work();
        return;
    }
    uint32_t depth = step_out();
    __atomic_add_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t seen = __atomic_load_n(&epoch, __ATOMIC_SEQ_CST);
        if (!vgpu_away_now())
            break;
        syscall(SYS_futex, &epoch, FUTEX_WAIT_PRIVATE, seen, &most, NULL, 0);
    }
    __atomic_sub_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    step_in(depth);
    vgpu_away_follow();
    say_work();
}

void vgpu_away_start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    limits = page;
    slot = own;
    __atomic_store_n(&slot->wants, 0, __ATOMIC_SEQ_CST); /* of the slot's last owner */
    tell_start(page, own);
    vgpu_away_answer(0, false, false);
    vgpu_away_follow();
}

void vgpu_away_answer(uint64_t launches, bool busy, bool quiet)
{
    uint64_t calls = launches + __atomic_load_n(&vgpu_away.calls, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->calls, calls, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->busy, busy, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->quiet, quiet, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&slot->looks, 1, __ATOMIC_SEQ_CST);
    tell_answer(quiet);
}

static void reset(void)
{
    limits = NULL;
    slot = NULL;
    memset(&vgpu_away, 0, sizeof(vgpu_away));
}
VGPU_IN_CHILD(reset);

#include "suspended.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "in_child.h"
#include "thread.h"

#define LOOK_NS 100000000 /* interval of polling the lease without an arbiter (an arbiter would report the resume) */

struct vgpu_suspended_words vgpu_suspended;

static const struct vgpu_limits *limits;
static struct vgpu_slot *slot;
static uint32_t epoch; /* futex word that changes when the lease is resumed */

/* The linker's symbols for the beginning and the end of section vgpu_suspended_listeners. */
extern const struct vgpu_suspended_listener *const __start_vgpu_suspended_listeners[]
    __attribute__((visibility("hidden")));
extern const struct vgpu_suspended_listener *const __stop_vgpu_suspended_listeners[]
    __attribute__((visibility("hidden")));

static void tell_start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    for (const struct vgpu_suspended_listener *const *to = __start_vgpu_suspended_listeners;
         to < __stop_vgpu_suspended_listeners; to++)
        (*to)->start(page, own);
}

static void tell_answer(bool quiet)
{
    for (const struct vgpu_suspended_listener *const *to = __start_vgpu_suspended_listeners;
         to < __stop_vgpu_suspended_listeners; to++)
        (*to)->follow(quiet);
}

uint32_t vgpu_suspended_state(void)
{
    return limits == NULL ? 0 : __atomic_load_n(&limits->state, __ATOMIC_ACQUIRE);
}

bool vgpu_suspended_now(void)
{
    return vgpu_suspended_state() == VGPU_LEASE_SUSPENDED || vgpu_suspended_held();
}

static void (*on_work)(void);

void vgpu_suspended_on_work(void (*say)(void))
{
    __atomic_store_n(&on_work, say, __ATOMIC_RELEASE);
}

/*
 * Reports work to the arbiter. The report sends a message, which is a cancellation point. Locks are held meanwhile, so
 * the thread must not be cancelled.
 */
static void say_work(void)
{
    void (*say)(void) = __atomic_load_n(&on_work, __ATOMIC_ACQUIRE);
    if (say == NULL)
        return;
    int cancels = vgpu_thread_keep();
    say();
    vgpu_thread_release(cancels);
}

static uint32_t set_bit(uint32_t bit, bool to)
{
    uint32_t before = to ? __atomic_fetch_or(&vgpu_suspended.bits, bit, __ATOMIC_SEQ_CST)
                         : __atomic_fetch_and(&vgpu_suspended.bits, ~bit, __ATOMIC_SEQ_CST);
    return before & bit;
}

void vgpu_suspended_set(uint32_t bit, bool to)
{
    set_bit(bit, to);
}

struct vgpu_inside *vgpu_suspended_enter(void)
{
    for (;;) {
        uint32_t bits = __atomic_load_n(&vgpu_suspended.bits, __ATOMIC_ACQUIRE);
        if ((bits & (VGPU_SUSPENDED_LEASE | VGPU_SUSPENDED_IDLE)) != 0)
            vgpu_suspended_wait();
        if ((bits & VGPU_SUSPENDED_CUT) == 0)
            return NULL;
        struct vgpu_inside *own = vgpu_inside_enter();
        if ((__atomic_load_n(&vgpu_suspended.bits, __ATOMIC_ACQUIRE) & (VGPU_SUSPENDED_LEASE | VGPU_SUSPENDED_IDLE)) ==
            0)
            return own;
        /* the process may have become idle before vgpu_inside_enter; the next turn of the loop then reports this call */
        vgpu_inside_leave(&own);
    }
}

/* Marks a thread that waits for the lease as not inside the driver, although its call has begun. */
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

void vgpu_suspended_follow(void)
{
    bool suspended = vgpu_suspended_now();
    bool before = set_bit(VGPU_SUSPENDED_LEASE, suspended) != 0;
    if (before && !suspended) {
        __atomic_store_n(&slot->quiet, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&epoch, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
}

void vgpu_suspended_wait(void)
{
    struct timespec most = {.tv_nsec = LOOK_NS};
    if (!vgpu_suspended_now()) {
        uint32_t bits = __atomic_load_n(&vgpu_suspended.bits, __ATOMIC_RELAXED);
        if ((bits & VGPU_SUSPENDED_LEASE) != 0)
            vgpu_suspended_follow();
        if ((bits & VGPU_SUSPENDED_IDLE) != 0)
            say_work();
        return;
    }
    uint32_t depth = step_out();
    __atomic_add_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t seen = __atomic_load_n(&epoch, __ATOMIC_SEQ_CST);
        if (!vgpu_suspended_now())
            break;
        syscall(SYS_futex, &epoch, FUTEX_WAIT_PRIVATE, seen, &most, NULL, 0);
    }
    __atomic_sub_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    step_in(depth);
    vgpu_suspended_follow();
    say_work();
}

void vgpu_suspended_start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    limits = page;
    slot = own;
    /* the word `wants` may still have the value of the slot's former owner */
    __atomic_store_n(&slot->wants, 0, __ATOMIC_SEQ_CST);
    tell_start(page, own);
    vgpu_suspended_answer(0, false, false);
    vgpu_suspended_follow();
}

void vgpu_suspended_answer(uint64_t launches, bool busy, bool quiet)
{
    uint64_t calls = launches + __atomic_load_n(&vgpu_suspended.calls, __ATOMIC_SEQ_CST);
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
    memset(&vgpu_suspended, 0, sizeof(vgpu_suspended));
}
VGPU_IN_CHILD(reset);

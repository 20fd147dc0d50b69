#include "swap.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "suspended.h"
#include "capture.h"
#include "channels.h"
#include "evict_copy.h"
#include "parked.h"
#include "functions.h"
#include "driver_overhead.h"
#include "allocation.h"
#include "source.h"
#include "table.h"
#include "thread.h"
#include "in_child.h"

/* the swap thread's stack: as large as a usual thread's, because the driver compiles the kernel of digest.h on it */
#define STACK_BYTES (8 << 20)
#define LOOK_NS 100000000 /* maximum of time between two looks at the lease, whose changes an arbiter reports earlier */
#define STEP_NS 200000    /* interval between two checks for an event that is expected soon */
#define AGAIN_NS 3000000  /* interval between two attempts to bring memory back to a full card */

struct vgpu_swap_words vgpu_swap;

static const struct vgpu_limits *limits;
static struct vgpu_slot *slot;
static bool started;
static uint32_t news;  /* futex word that changes when the lease's request or the gate's state may have changed */
static uint32_t seen;  /* the value of `news` that the swap thread has seen */
static uint32_t quiet; /* 1: the gate has drained since the suspension */
/*
 * enum vgpu_swap_phase; the swap thread or the link's thread, whichever notices the resume first, sets DRAINING to HERE
 */
static uint32_t phase;

static void say(enum vgpu_swap_phase now)
{
    __atomic_store_n(&phase, now, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->swap_phase, now, __ATOMIC_SEQ_CST);
}

static void say_error(CUresult error)
{
    __atomic_store_n(&slot->swap_error, (uint32_t)error, __ATOMIC_SEQ_CST);
}

static bool turn_phase(enum vgpu_swap_phase from, enum vgpu_swap_phase to)
{
    uint32_t expected = from;
    bool turned = __atomic_compare_exchange_n(&phase, &expected, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (turned)
        __atomic_store_n(&slot->swap_phase, to, __ATOMIC_SEQ_CST);
    return turned;
}

struct stays {
    uint64_t by_kind[VGPU_STAY_KINDS];
};

static bool add_entry(const struct vgpu_entry *entry, void *argument)
{
    struct stays *stays = argument;
    if (entry->kind == VGPU_KIND_PAGE || (entry->kind == VGPU_KIND_POINTER && entry->bytes > VGPU_SHARED_MAX))
        stays->by_kind[VGPU_STAY_PLAIN] += entry->bytes;
    else if (entry->kind == VGPU_KIND_MANAGED)
        stays->by_kind[VGPU_STAY_MANAGED] += entry->bytes;
    return false;
}

/*
 * Reports how much memory of each kind no eviction takes. The threads of the program wait meanwhile, so the figures
 * stay true.
 */
static void say_stays(void)
{
    struct stays stays = {0};
    vgpu_table_purge(add_entry, &stays);
    vgpu_sources_add(stays.by_kind);
    vgpu_channels_stays(stays.by_kind);
}

static uint32_t saves(void)
{
    return __atomic_load_n(&limits->saves, __ATOMIC_ACQUIRE);
}

/* Reports OUT, and how much memory is still on the device. If the driver saves the process next, prepares that first. */
static void say_out(void)
{
    bool saved = saves() != VGPU_SAVES_NOTHING;
    if (saved)
        vgpu_evict_ready();
    say_stays();
    uint32_t kept = (uint32_t)(vgpu_evict_count().here >> 20);
    __atomic_store_n(&phase, VGPU_SWAP_OUT, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->swap_phase, VGPU_SWAP_OUT | kept << VGPU_SWAP_KEPT_SHIFT | (saved ? VGPU_SWAP_READY : 0),
                     __ATOMIC_SEQ_CST);
}

/* Reports HERE, and how many blocks are still on the device that the process has left. */
static void say_here(void)
{
    __atomic_store_n(&phase, VGPU_SWAP_HERE, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->swap_phase, VGPU_SWAP_HERE | vgpu_parked_behind() << VGPU_SWAP_KEPT_SHIFT,
                     __ATOMIC_SEQ_CST);
}

/* Returns how many of `all` evictable bytes may stay on the device. */
static uint64_t may_keep_of(uint64_t all)
{
    uint32_t share = __atomic_load_n(&limits->keep_share, __ATOMIC_ACQUIRE);
    return share >= VGPU_SHARE_ALL ? UINT64_MAX : all / VGPU_SHARE_ALL * share;
}

static uint64_t may_keep(void)
{
    return may_keep_of(vgpu_evict_count().all);
}

/* Returns whether the lease orders the memory off the device. */
static bool is_sent(void)
{
    return vgpu_suspended_state() == VGPU_LEASE_SUSPENDED &&
           __atomic_load_n(&limits->memory, __ATOMIC_ACQUIRE) == VGPU_MEMORY_OUT;
}

/*
 * Prepares the host buffer while the program works, if an eviction is likely (VGPU_MEMORY_SOON). Returns true if it
 * should be called again at once. Does nothing during a stream capture; after an error it does nothing until the lease
 * leaves VGPU_MEMORY_SOON.
 */
static bool prepare(void)
{
    static bool failed;
    if (__atomic_load_n(&limits->memory, __ATOMIC_ACQUIRE) != VGPU_MEMORY_SOON) {
        failed = false;
        return false;
    }
    if (failed || vgpu_capture_any())
        return false;
    uint64_t all = __atomic_load_n(&slot->movable_bytes, __ATOMIC_RELAXED);
    uint64_t kept = may_keep_of(all);
    /* page-locking memory holds up the program's launches, so no buffer is made for memory that does not leave */
    bool grown = vgpu_evict_prepare(all > kept ? all - kept : 0);
    failed = !grown && vgpu_evict_error() != CUDA_SUCCESS;
    return grown;
}

/* Called by the swap thread: waits for news, or until `ns` have passed, independently of the wall clock. */
static void pause_for(int64_t ns)
{
    const struct timespec most = {.tv_nsec = (long)ns};
    syscall(SYS_futex, &news, FUTEX_WAIT_PRIVATE, seen, &most, NULL, 0);
    seen = __atomic_load_n(&news, __ATOMIC_SEQ_CST);
}

static void tell(void)
{
    __atomic_add_fetch(&news, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &news, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* --- for threads that use the memory */

bool vgpu_swap_enter_counted(void)
{
    for (;;) {
        __atomic_add_fetch(&vgpu_swap.inside, 1, __ATOMIC_SEQ_CST);
        if (!vgpu_suspended_held())
            return true;
        __atomic_sub_fetch(&vgpu_swap.inside, 1, __ATOMIC_SEQ_CST);
        vgpu_suspended_wait();
    }
}

bool vgpu_swap_wanted(void)
{
    return limits != NULL && __atomic_load_n(&limits->memory, __ATOMIC_ACQUIRE) != VGPU_MEMORY_FIXED &&
           __atomic_load_n(&started, __ATOMIC_ACQUIRE);
}

void vgpu_swap_count(void)
{
    __atomic_store_n(&vgpu_swap.counts, 1, __ATOMIC_SEQ_CST);
}

void vgpu_swap_holds(int64_t bytes)
{
    __atomic_fetch_add(&slot->movable_bytes, (uint64_t)bytes, __ATOMIC_SEQ_CST);
}

bool vgpu_swap_ending_begins(void)
{
    bool entered = vgpu_swap_enter();
    vgpu_evict_stop();
    return entered;
}

void vgpu_swap_ending_ends(bool entered)
{
    vgpu_evict_go_on();
    vgpu_swap_leave(entered);
}

void vgpu_swap_forget(CUcontext context)
{
    vgpu_evict_forget(context);
}

/* --- the swap thread */

static void hold(void)
{
    vgpu_suspended_hold(true);
}

static void let_in(void)
{
    vgpu_suspended_hold(false);
    vgpu_suspended_follow();
}

/* In each context with evictable memory, waits for work that did not pass the gate, such as small copies. */
static void wait_for_contexts(void)
{
    CUcontext done = NULL;
    for (const struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL;
         allocation = allocation->next) {
        CUcontext popped;
        if (allocation->context == done || CALL(cuCtxPushCurrent_v2, allocation->context) != CUDA_SUCCESS)
            continue;
        CALL(cuCtxSynchronize);
        CALL(cuCtxPopCurrent_v2, &popped);
        done = allocation->context;
    }
}

/*
 * Waits until no work of the program uses the memory (during a stream capture, only for launches and calls). Returns
 * false if the lease was resumed before.
 */
static bool drain(void)
{
    say(VGPU_SWAP_DRAINING);
    hold();
    while (is_sent() &&
           (!__atomic_load_n(&quiet, __ATOMIC_ACQUIRE) || __atomic_load_n(&vgpu_swap.inside, __ATOMIC_SEQ_CST) > 0))
        pause_for(STEP_NS);
    if (is_sent() && !vgpu_capture_any())
        wait_for_contexts(); /* this may take long; `follow` lets the program continue if the lease is resumed meanwhile */
    return is_sent() && turn_phase(VGPU_SWAP_DRAINING, VGPU_SWAP_GOING);
}

/*
 * Brings all memory back to the device. Returns false if the lease was suspended again meanwhile; the memory is then
 * out.
 */
static bool come_back(void)
{
    while (!vgpu_evict_in(is_sent)) {
        if (is_sent()) {
            vgpu_evict_in_undo();
            return false;
        }
        say_error(vgpu_evict_error());
        pause_for(AGAIN_NS);
    }
    say_error(CUDA_SUCCESS);
    return true;
}

static void go(void)
{
    if (!drain()) {
        if (turn_phase(VGPU_SWAP_DRAINING, VGPU_SWAP_HERE))
            let_in();
        return;
    }
    vgpu_overhead_free_begins(); /* NVML's figure for this process has no meaning until the memory is back */
    /*
     * A thread that waits for the lease cannot end its stream capture now, and an eviction would invalidate the
     * capture. So the swap is refused.
     */
    bool captures = vgpu_capture_any();
    if (!captures && saves() == VGPU_SAVES_PARKED)
        vgpu_evict_park();
    if (!captures && vgpu_evict_out(may_keep())) {
        say_out();
        return;
    }
    CUresult why = captures ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : vgpu_evict_error();
    while (!vgpu_evict_in(NULL))
        pause_for(AGAIN_NS);
    vgpu_overhead_free_ends();
    say_error(why);
    say(VGPU_SWAP_REFUSED);
    let_in();
}

static void come(void)
{
    say_error(CUDA_SUCCESS);
    say(VGPU_SWAP_COMING);
    if (!come_back()) {
        say_out();
        return;
    }
    vgpu_overhead_free_ends();
    say_here();
    let_in();
    vgpu_parked_end();
    say_here();
}

/*
 * Returns whether the lease orders more of a process whose memory is out than the process has done. A process that is
 * ready for the driver stays as it is, because an eviction would page-lock its buffers while the driver saves it.
 */
static bool is_behind(void)
{
    if (saves() != VGPU_SAVES_NOTHING)
        return (__atomic_load_n(&slot->swap_phase, __ATOMIC_SEQ_CST) & VGPU_SWAP_READY) == 0;
    return vgpu_evict_count().here > may_keep();
}

/*
 * Evicts more of the memory that was kept on the device, because other tenants need the room, or prepares a process for
 * the driver.
 */
static void shrink(void)
{
    __atomic_fetch_and(&slot->swap_phase, ~VGPU_SWAP_READY, __ATOMIC_SEQ_CST);
    say_error(vgpu_evict_out(may_keep()) ? CUDA_SUCCESS : vgpu_evict_error());
    say_out();
}

static void *keep(void *unused)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool relaxed = false;
    (void)unused;
    for (;;) {
        bool sent = is_sent();
        uint32_t now = __atomic_load_n(&phase, __ATOMIC_SEQ_CST);
        if (!relaxed && vgpu_swap_counts())
            relaxed = CALL(cuThreadExchangeStreamCaptureMode, &mode) == CUDA_SUCCESS;
        if (sent && now == VGPU_SWAP_HERE) {
            go();
        } else if (!sent && now == VGPU_SWAP_OUT) {
            come();
        } else if (!sent && now == VGPU_SWAP_REFUSED) {
            say_error(CUDA_SUCCESS);
            say(VGPU_SWAP_HERE);
        } else if (sent || !prepare()) {
            if (sent && now == VGPU_SWAP_OUT && is_behind())
                shrink();
            pause_for(LOOK_NS);
        }
    }
    return NULL;
}

static void start_thread(void)
{
    __atomic_store_n(&started, vgpu_thread_start(keep, NULL, STACK_BYTES, NULL), __ATOMIC_RELEASE);
}

/* --- called by the link's thread */

static void start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    limits = page;
    slot = own;
    say(VGPU_SWAP_HERE);
    say_error(CUDA_SUCCESS);
    /* the words may still have the values of the slot's former owner */
    __atomic_store_n(&slot->movable_bytes, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->host_bytes, 0, __ATOMIC_SEQ_CST);
    vgpu_evict_start(&slot->host_bytes, &slot->swap_phase);
    if (__atomic_load_n(&page->memory, __ATOMIC_ACQUIRE) != VGPU_MEMORY_FIXED)
        start_thread();
}

static void follow(bool is_quiet)
{
    if (limits == NULL)
        return;
    __atomic_store_n(&quiet, is_quiet, __ATOMIC_RELEASE);
    if (!started && __atomic_load_n(&limits->memory, __ATOMIC_ACQUIRE) != VGPU_MEMORY_FIXED)
        start_thread();
    if (!is_sent() && turn_phase(VGPU_SWAP_DRAINING, VGPU_SWAP_HERE))
        let_in();
    tell();
}

static const struct vgpu_suspended_listener listener = {.start = start, .follow = follow};
VGPU_SUSPENDED_LISTENER(listener);

static void reset(void)
{
    limits = NULL;
    slot = NULL;
    started = false;
    phase = VGPU_SWAP_HERE;
    quiet = 0;
    memset(&vgpu_swap, 0, sizeof(vgpu_swap));
}
VGPU_IN_CHILD(reset);

#include "gate.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arbiter_link.h"
#include "suspended.h"
#include "capture.h"
#include "channels.h"
#include "clock.h"
#include "cut.h"
#include "duty.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "lease_open.h"
#include "in_flight.h"
#include "tenant.h"
#include "thread.h"

#define WATCH_NS 250000             /* interval between two checks for idleness */
#define DRAIN_POLL_NS 30000         /* interval between two checks of a drain */
#define SILENCE_NS 3000000000u      /* an arbiter that leaves a request unanswered for this long counts as dead */
#define PACE_WAIT_MAX_NS 100000000u /* maximum delay of a launch: work in flight may wait for the delayed launch */
/* a longer transit time of a message means that the sender is in another time namespace */
#define TRANSIT_MAX_NS 2000000u
#define DUTY_WINDOW_NS 2000000u
#define SLEEP_ABOVE_NS 300000u
#define COUNT_NS 1000000000 /* interval between two publications of a process's counts under the engine cut */

enum state { CLOSED, OPEN, FREE, CUT };

static struct {
    pthread_mutex_t lock;
    enum state state; /* waiting threads read this word without the lock */
    bool linked;
    bool gated;  /* the process has no channels of its own, so the engine cut is impossible */
    bool held;   /* the process has a slice: from the grant until none of its work is left on the device */
    bool wanted; /* WANT was sent, or DONE with MORE */
    bool fresh;  /* there was no launch in this slice yet */
    struct vgpu_turn turn;
    uint64_t ends_at; /* end of the slice; UINT64_MAX: it has no end */
    uint64_t wanted_at;
    uint64_t seen_at; /* time of the last check for idleness */
    int64_t idle_ns;  /* idle time in this slice */
    uint64_t granted_at;
    uint64_t seen_count; /* count of launches at the last check: if it changes, the process was not idle */
    uint32_t waiting;    /* number of threads that wait at the gate */
    uint32_t epoch;      /* futex word that changes with the state */
    bool draining;       /* a drain was begun for this slice */
    bool watching;       /* a drain was begun to check for idleness */
    bool look;           /* LOOK was received, and has not been answered yet */
    bool suspended;      /* the lease was suspended at the last LOOK */
    bool probing;        /* a drain was begun to check for unfinished launches */
    uint64_t looked_count;
    struct vgpu_duty duty;
    const struct vgpu_limits *limits;
    double share; /* the last value of own_share */
    struct vgpu_usage *usage;
    uint32_t slot;
    uint64_t counted;
    uint64_t counted_at; /* time of the last publication of counts, for a process under the engine cut */
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t one_drains = PTHREAD_MUTEX_INITIALIZER; /* held by the one thread that drains */

static enum state state_now(void)
{
    return __atomic_load_n(&gate.state, __ATOMIC_ACQUIRE);
}

/* --- below: the caller holds the lock */

static uint64_t free_until(void)
{
    return vgpu_launches_counted() + vgpu_in_flight_free(gate.limits->device_count);
}

static void set_state(enum state state)
{
    if (state == CLOSED || state == FREE)
        __atomic_store_n(&vgpu_launches.allow, state == FREE ? free_until() : 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&gate.state, state, __ATOMIC_RELEASE);
    __atomic_add_fetch(&gate.epoch, 1, __ATOMIC_SEQ_CST);
    if (gate.waiting > 0)
        syscall(SYS_futex, &gate.epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void close_gate(void)
{
    set_state(CLOSED);
    gate.draining = false;
    gate.watching = false;
}

/*
 * Takes over the terms of a slice. Launches in a slice without pacing are not checked, so the end of such a slice would
 * not be noticed. So a slice with an end is paced, whatever its flags are.
 */
static void set_terms(const struct vgpu_turn *turn, uint64_t now)
{
    bool endless = turn->length_ns == VGPU_TURN_OPEN_ENDED;
    gate.turn = *turn;
    gate.ends_at = endless ? UINT64_MAX : now + turn->length_ns;
    set_state(endless && (turn->flags & VGPU_TURN_FREE) != 0 ? FREE : OPEN);
}

static void open_turn(const struct vgpu_turn *turn, uint64_t now)
{
    gate.held = true;
    gate.wanted = false;
    gate.fresh = true;
    gate.draining = false;
    gate.watching = false;
    gate.seen_count = vgpu_launches_counted();
    gate.seen_at = now;
    gate.idle_ns = 0;
    gate.granted_at = turn->sent_ns < now && now - turn->sent_ns < TRANSIT_MAX_NS ? turn->sent_ns : now;
    __atomic_store_n(&vgpu_launches.allow, 0, __ATOMIC_SEQ_CST);
    set_terms(turn, now);
}

static void note_launches(void)
{
    uint64_t count = vgpu_launches_counted() + vgpu_inside_launches();
    uint64_t *launches = &gate.usage->slots[gate.slot].devices[0].launches;
    __atomic_fetch_add(launches, count - gate.counted, __ATOMIC_RELAXED);
    gate.counted = count;
}

static void send_message(uint32_t kind, uint32_t flags, int64_t idle_ns)
{
    struct vgpu_message message = {.kind = kind, .version = VGPU_LEASE_VERSION, .slot = gate.slot};
    message.turn = (struct vgpu_turn){.number = gate.turn.number,
                                      .length_ns = (uint64_t)idle_ns,
                                      .flags = flags,
                                      .devices = vgpu_in_flight_declare()};
    message.turn.sent_ns = now_ns();
    vgpu_link_send(&message); /* an error is ignored here: the link's thread notices a broken connection */
}

static void want(uint64_t now)
{
    if (gate.wanted || !gate.linked)
        return;
    gate.wanted = true;
    gate.wanted_at = now;
    send_message(VGPU_MSG_WANT, gate.gated ? VGPU_TURN_GATED : 0, 0);
}

static void give_back(uint64_t now)
{
    bool more = gate.waiting > 0 && !vgpu_suspended_now();
    gate.held = false;
    /* from now on this process has no work in the driver, and the answer to LOOK must say so */
    gate.look = gate.look || vgpu_suspended_now();
    vgpu_in_flight_idle();
    note_launches();
    if (gate.linked) {
        gate.wanted = more;
        gate.wanted_at = now;
        send_message(VGPU_MSG_DONE, more ? VGPU_TURN_MORE : 0, gate.idle_ns);
    } else if (gate.ends_at != UINT64_MAX && now > gate.ends_at) {
        vgpu_duty_overrun(&gate.duty, now - gate.ends_at);
    }
}

/*
 * Declines a slice that came too late, because the lease is suspended by now. The driver is not called, and nothing was
 * launched.
 */
static void decline_turn(const struct vgpu_turn *turn, uint64_t now)
{
    gate.turn = *turn;
    gate.ends_at = now;
    gate.wanted = false;
    gate.idle_ns = 0;
    give_back(now);
}

static double own_share(void)
{
    return gate.share = vgpu_duty_share(gate.limits, gate.share);
}

/* --- below: the caller does not hold the lock */

/* Makes one step of draining. Returns true if the devices were given back. */
static bool drain_step(void)
{
    bool done = false;
    if (pthread_mutex_trylock(&one_drains) != 0)
        return false;
    pthread_mutex_lock(&gate.lock);
    bool due = gate.held && gate.state == CLOSED;
    bool begin = due && !gate.draining;
    uint64_t turn = gate.turn.number;
    gate.draining |= begin;
    pthread_mutex_unlock(&gate.lock);
    if (begin)
        vgpu_drain_begin();
    if (due && vgpu_drain_done()) {
        pthread_mutex_lock(&gate.lock);
        done = gate.held && gate.state == CLOSED && gate.draining && gate.turn.number == turn;
        if (done)
            give_back(now_ns());
        pthread_mutex_unlock(&gate.lock);
    }
    pthread_mutex_unlock(&one_drains);
    return done;
}

/*
 * Sleeps until the gate's state changes, for at most 1 s. Closes the connection if the arbiter has not answered for
 * SILENCE_NS. Precondition: the gate is closed, and no slice is held.
 */
static void sleep_at_gate(uint32_t epoch)
{
    const struct timespec most = {.tv_sec = 1};
    syscall(SYS_futex, &gate.epoch, FUTEX_WAIT_PRIVATE, epoch, &most, NULL, 0);
    pthread_mutex_lock(&gate.lock);
    bool silent = gate.state == CLOSED && gate.linked && gate.wanted && now_ns() - gate.wanted_at > SILENCE_NS;
    pthread_mutex_unlock(&gate.lock);
    if (silent)
        vgpu_link_hang_up();
}

/* Waits until the gate is open. */
static void wait_for_turn(void)
{
    pthread_mutex_lock(&gate.lock);
    uint64_t began = now_ns();
    gate.waiting++;
    while (gate.state == CLOSED) {
        uint64_t now = now_ns();
        if (vgpu_suspended_now()) {
            pthread_mutex_unlock(&gate.lock);
            vgpu_suspended_wait();
            pthread_mutex_lock(&gate.lock);
            /* throttled_ns does not count the time of a suspension, because the share does not cause it */
            began += now_ns() - now;
            continue;
        }
        bool draining = gate.held;
        want(now);
        uint32_t epoch = gate.epoch;
        pthread_mutex_unlock(&gate.lock);
        if (!draining)
            sleep_at_gate(epoch);
        else if (!drain_step())
            pause_ns(DRAIN_POLL_NS);
        pthread_mutex_lock(&gate.lock);
    }
    gate.waiting--;
    uint64_t *throttled = &gate.usage->slots[gate.slot].devices[0].throttled_ns;
    __atomic_fetch_add(throttled, now_ns() - began, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&gate.lock);
}

/* Called while the gate is open. Returns whether the launch may run. */
static bool admit(CUstream stream, int per_thread)
{
    uint64_t began = now_ns();
    for (;;) {
        uint64_t batch;
        uint64_t wait;
        uint64_t now = now_ns();
        pthread_mutex_lock(&gate.lock);
        bool open = gate.state == OPEN;
        struct vgpu_turn turn = gate.turn;
        bool first = gate.fresh;
        uint64_t left = gate.ends_at == UINT64_MAX ? UINT64_MAX : gate.ends_at > now ? gate.ends_at - now : 0;
        pthread_mutex_unlock(&gate.lock);
        if (!open)
            return false;
        enum vgpu_admission answer = vgpu_in_flight_admit(stream, per_thread, &turn, left, first, &batch, &wait);
        if (answer == VGPU_ADMIT_WAIT && now - began < PACE_WAIT_MAX_NS) {
            if (wait > SLEEP_ABOVE_NS)
                pause_ns(wait / 2);
            else
                sched_yield();
            continue;
        }
        pthread_mutex_lock(&gate.lock);
        bool same = gate.state == OPEN && gate.turn.number == turn.number;
        if (same && answer == VGPU_ADMIT_STOP)
            close_gate();
        else if (same) {
            now = now_ns();
            if (gate.fresh)
                gate.idle_ns = now > gate.granted_at ? (int64_t)(now - gate.granted_at) : 0;
            gate.fresh = false;
            __atomic_store_n(&vgpu_launches.allow, vgpu_launches_counted() + batch, __ATOMIC_SEQ_CST);
        }
        pthread_mutex_unlock(&gate.lock);
        return same && answer != VGPU_ADMIT_STOP;
    }
}

/* Ends a slice that does not include the device of this launch. The next slice will include it. */
static void end_if_stray(void)
{
    pthread_mutex_lock(&gate.lock);
    if (gate.linked && gate.held && gate.state != CLOSED)
        close_gate();
    pthread_mutex_unlock(&gate.lock);
}

/*
 * Handles a launch under the engine cut. A process without channels of its own, such as a client of MPS, must use the
 * gate; then it returns false.
 */
static bool stay_cut(void)
{
    if (vgpu_channels_known())
        return true;
    vgpu_cut_end();
    pthread_mutex_lock(&gate.lock);
    if (!gate.gated)
        /* a request that was sent before CUT came from a process that can be preempted, so it does not count */
        gate.wanted = false;
    gate.gated = true;
    if (gate.state == CUT)
        close_gate();
    pthread_mutex_unlock(&gate.lock);
    return false;
}

static CUresult look(CUstream stream, int per_thread)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS)
        return result;
    if (!limited) {
        __atomic_store_n(&vgpu_launches.allow, UINT64_MAX, __ATOMIC_RELAXED);
        return CUDA_SUCCESS;
    }
    vgpu_suspended_wait(); /* a suspended process's launch must wait here, before any call of the driver */
    if (vgpu_capture_on(stream, per_thread))
        return CUDA_SUCCESS;
    enum vgpu_touch touched = vgpu_in_flight_touch(stream, per_thread);
    /* without a context the launch has no device to wait for, and the driver refuses it */
    if (touched == VGPU_TOUCH_NO_CONTEXT)
        return CUDA_SUCCESS;
    if (touched == VGPU_TOUCH_NO_MEMORY)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (;;) {
        if (vgpu_in_flight_strays())
            end_if_stray();
        enum state state = state_now();
        if (state == FREE) {
            pthread_mutex_lock(&gate.lock);
            note_launches();
            if (gate.state == FREE)
                __atomic_store_n(&vgpu_launches.allow, free_until(), __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&gate.lock);
            return CUDA_SUCCESS;
        }
        if (state == CUT && stay_cut()) {
            vgpu_cut_work();
            return CUDA_SUCCESS;
        }
        if (state == OPEN && admit(stream, per_thread))
            return CUDA_SUCCESS;
        if (state_now() == CLOSED)
            wait_for_turn();
    }
}

CUresult vgpu_gate_look(CUstream stream, int per_thread, uint64_t weight)
{
    int cancels = vgpu_thread_keep();
    __atomic_add_fetch(&vgpu_launches.asked, weight, __ATOMIC_SEQ_CST);
    CUresult result = look(stream, per_thread);
    vgpu_thread_release(cancels);
    if (result != CUDA_SUCCESS)
        __atomic_sub_fetch(&vgpu_launches.asked, weight, __ATOMIC_SEQ_CST);
    return result;
}

void vgpu_gate_launched(uint64_t weight)
{
    __atomic_sub_fetch(&vgpu_launches.asked, weight, __ATOMIC_SEQ_CST);
}

/* --- called only by the link's thread */

static bool start(const char *folder, struct vgpu_usage *usage, uint32_t slot)
{
    gate.limits = vgpu_lease_limits(folder);
    if (gate.limits == NULL)
        return false;
    gate.usage = usage;
    gate.slot = slot;
    gate.share = -1;
    /* the lease's state is read at once: the tenant may be suspended before the arbiter sends its first LOOK */
    gate.look = true;
    vgpu_suspended_start(gate.limits, &usage->slots[slot]);
    return true;
}

static void linked(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.linked = true;
    gate.wanted = false;
    gate.look = true; /* a LOOK may have been missed while there was no connection */
    if (gate.state != CLOSED)
        close_gate();
    gate.gated = false;
    /* a slice from the time without an arbiter is dropped: its work ends beside that of the next holder */
    gate.held = false;
    if (gate.waiting > 0)
        want(now_ns());
    pthread_mutex_unlock(&gate.lock);
}

static void unlinked(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.linked = false;
    gate.wanted = false;
    vgpu_cut_end();
    if (own_share() < 0 && !vgpu_suspended_now())
        set_state(FREE);
    else if (gate.state != CLOSED)
        close_gate();
    pthread_mutex_unlock(&gate.lock);
}

static void take(const struct vgpu_message *message)
{
    uint64_t now = now_ns();
    pthread_mutex_lock(&gate.lock);
    if (message->kind == VGPU_MSG_GRANT) {
        if (gate.state == OPEN && message->turn.number == gate.turn.number)
            set_terms(&message->turn, now); /* the slice continues under new terms */
        else if (gate.state == CLOSED && !gate.held && vgpu_suspended_now())
            decline_turn(&message->turn, now);
        else
            open_turn(&message->turn, now);
    } else if (message->kind == VGPU_MSG_REVOKE && gate.held && message->turn.number == gate.turn.number) {
        if (gate.state != CLOSED)
            close_gate();
        gate.ends_at = now;
    } else if (message->kind == VGPU_MSG_CUT && !gate.gated) {
        vgpu_cut_guard(true);
        vgpu_cut_begin(message->turn.flags, &vgpu_launches.allow);
        if (gate.state != CUT)
            set_state(CUT);
    } else if (message->kind == VGPU_MSG_LOOK) {
        gate.look = true; /* the answer may need driver calls, so the link's thread gives it later */
    }
    pthread_mutex_unlock(&gate.lock);
}

/*
 * Watches an open slice that must be given back when idle: were there launches since the last check, and if not, have
 * all finished?
 */
static void watch(void)
{
    pthread_mutex_lock(&gate.lock);
    /* a launch that is being paced is already counted, but has not reached the driver */
    bool asked = __atomic_load_n(&vgpu_launches.asked, __ATOMIC_SEQ_CST) > 0;
    /* the count is read once: any later launch makes the next check find another count */
    uint64_t count = vgpu_launches_counted();
    bool quiet = gate.state == OPEN && count == gate.seen_count && !asked;
    bool begin = quiet && !gate.watching;
    uint64_t now = now_ns();
    uint64_t since = gate.seen_at;
    gate.seen_at = quiet ? gate.seen_at : now;
    gate.seen_count = count;
    gate.watching = quiet;
    pthread_mutex_unlock(&gate.lock);
    if (begin)
        vgpu_drain_begin();
    if (!quiet || !vgpu_drain_done())
        return;
    pthread_mutex_lock(&gate.lock);
    if (gate.state == OPEN && gate.watching && gate.held) {
        close_gate();
        asked = __atomic_load_n(&vgpu_launches.asked, __ATOMIC_SEQ_CST) > 0;
        /* if a launch came before the gate was closed, the slice goes on to drain, as at its end */
        if (vgpu_launches_counted() == gate.seen_count && !asked) {
            gate.idle_ns += (int64_t)(begin ? (now - since) / 2
                                            /* the work ended at some time between the two checks */
                                            : (uint64_t)WATCH_NS / 2);
            give_back(now);
        }
    }
    pthread_mutex_unlock(&gate.lock);
}

/*
 * Without an arbiter: if threads wait at the gate, begins a slice when the process's own duty cycle (duty.h) allows it,
 * or without a share at once. Begins none while the lease is suspended. Returns the nanoseconds until the next call.
 */
static int64_t own_turn(uint64_t now)
{
    uint64_t wait = VGPU_DUTY_PERIOD_NS;
    bool suspended = vgpu_suspended_now();
    pthread_mutex_lock(&gate.lock);
    if (gate.state == FREE && (own_share() >= 0 || suspended))
        close_gate();
    if (gate.waiting > 0 && !gate.held && gate.state == CLOSED && !suspended) {
        double share = own_share();
        uint64_t length = share < 0 ? VGPU_TURN_OPEN_ENDED : vgpu_duty_turn(&gate.duty, share, now, &wait);
        struct vgpu_turn turn = {.number = gate.turn.number + 1, .length_ns = length, .window_ns = DUTY_WINDOW_NS};
        turn.flags = share < 0 ? VGPU_TURN_FREE : VGPU_TURN_WATCH;
        if (turn.length_ns > 0) {
            open_turn(&turn, now);
            wait = 0;
        }
    }
    pthread_mutex_unlock(&gate.lock);
    return (int64_t)wait;
}

/*
 * Returns whether there is unfinished work. `same`: nothing was launched since the last check; a drain then shows
 * whether work is left. The first such call begins the drain, and later calls check it. While the gate is closed, a
 * slice that is still held counts as work.
 */
static bool is_busy(bool closed, bool held, bool same)
{
    if (closed || !same) {
        gate.probing = false;
        return held || !same;
    }
    if (!gate.probing)
        vgpu_drain_begin();
    gate.probing = true;
    return !vgpu_drain_done();
}

/*
 * Answers the arbiter's message LOOK: has this process unfinished work? If the lease is suspended, the answer is "no" only
 * after the slice has ended and its work has finished: no thread of this process then waits for work inside the driver.
 */
static void answer_look(void)
{
    bool suspended = vgpu_suspended_now();
    pthread_mutex_lock(&gate.lock);
    vgpu_suspended_follow();
    bool resumed = gate.suspended && !suspended;
    gate.suspended = suspended;
    bool cut = gate.state == CUT;
    if (cut && suspended)
        /* makes the next launch check the lease, and wait */
        __atomic_store_n(&vgpu_launches.allow, 0, __ATOMIC_SEQ_CST);
    if (!cut && suspended && gate.state != CLOSED)
        close_gate();
    bool closed = gate.state == CLOSED || vgpu_cut_idle();
    bool held = cut ? !closed : gate.held;
    uint64_t count = vgpu_launches_counted();
    bool same = count == gate.looked_count;
    gate.look = false;
    gate.looked_count = count;
    note_launches();
    pthread_mutex_unlock(&gate.lock);
    if (resumed)
        vgpu_channels_moved();
    bool busy = suspended ? held : is_busy(closed, held, same);
    if (!suspended)
        vgpu_overhead_look_all(); /* vgpud learns only here of memory that the driver allocated since the last call */
    vgpu_suspended_answer(count, busy, suspended && !held);
}

static int64_t cut_tick(void)
{
    int64_t wait;
    bool became_idle = vgpu_cut_look(&wait);
    uint64_t now = now_ns();
    pthread_mutex_lock(&gate.lock);
    if (became_idle || now - gate.counted_at >= COUNT_NS) {
        note_launches();
        gate.counted_at = now;
    }
    pthread_mutex_unlock(&gate.lock);
    if (wait < 0) /* libvgpu does not check the process for idleness, so it launches without a report */
        wait = COUNT_NS;
    if (!became_idle || !vgpu_suspended_now())
        return wait;
    pthread_mutex_lock(&gate.lock);
    gate.look = true; /* from now on this process has no work in the driver, and the answer to LOOK must say so */
    pthread_mutex_unlock(&gate.lock);
    return 0;
}

/*
 * Does all work that is due: answers LOOK, ends a slice, drains, checks for idleness, or follows the duty cycle.
 * Returns the nanoseconds until the next call; -1 if none is due before a message comes.
 */
static int64_t do_due(void)
{
    uint64_t now = now_ns();
    pthread_mutex_lock(&gate.lock);
    bool asked = gate.look;
    pthread_mutex_unlock(&gate.lock);
    if (asked)
        answer_look();
    if (state_now() == CUT)
        return cut_tick();
    pthread_mutex_lock(&gate.lock);
    if (gate.state == OPEN && gate.ends_at != UINT64_MAX && now >= gate.ends_at)
        close_gate();
    int64_t look = WATCH_NS;
    enum state state = gate.state;
    bool held = gate.held;
    bool watches = state == OPEN && (gate.turn.flags & VGPU_TURN_WATCH) != 0;
    bool alone = !gate.linked;
    uint64_t ends_at = gate.ends_at;
    bool helped = gate.waiting > 0;
    pthread_mutex_unlock(&gate.lock);
    if (held && state == CLOSED) {
        if (drain_step())
            return 0;
        return helped ? 1000000 : DRAIN_POLL_NS;
    }
    if (watches)
        watch();
    if (state == OPEN && ends_at != UINT64_MAX) {
        int64_t left = ends_at > now ? (int64_t)(ends_at - now) : 0;
        return watches && left > look ? look : left;
    }
    if (alone && state != OPEN)
        return own_turn(now);
    return -1;
}

static int64_t tick(void)
{
    vgpu_cut_guard(false);
    return do_due();
}

static const struct vgpu_link_listener listener = {
    .start = start, .linked = linked, .unlinked = unlinked, .message = take, .tick = tick};
VGPU_LINK_LISTENER(listener);

static void reset(void)
{
    vgpu_cut_reset();
    if (gate.limits != NULL)
        munmap((void *)gate.limits, sizeof(struct vgpu_limits));
    memset(&gate, 0, sizeof(gate));
    pthread_mutex_init(&gate.lock, NULL);
    pthread_mutex_init(&one_drains, NULL);
}
VGPU_IN_CHILD(reset);

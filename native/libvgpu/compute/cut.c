#include "cut.h"

#include <pthread.h>
#include <string.h>

#include "arbiter_link.h"
#include "suspended.h"
#include "channels.h"
#include "clock.h"
#include "inside.h"
#include "in_flight.h"
#include "lease_limits.h"
#include "tenant.h"
#include "thread.h"

#define WATCH_NS 250000u /* interval between two checks for idleness */
#define WATCH_BRIEF_NS 40000u
#define WATCH_OFF_NS 1000000u /* interval of such checks while the process is off the device and cannot become idle */
#define QUIET_NS 400000u      /* the process counts as idle after this time without a call, if no work is left */
#define QUIET_BRIEF_NS 40000u
#define QUIET_MAX_NS 3000000u /* maximum of the adapted time without a call: see learn_quiet_time() */
#define TOO_EARLY_NS 1000000u
#define SAMPLE_NS 1000000u
#define SAMPLE_MAX_MS 20u /* a sample counts for the time since the sample before, but for at most this time */
/* samples take at most 1/SAMPLE_COSTS of the time: after a sample, the next one waits SAMPLE_COSTS times as long */
#define SAMPLE_COSTS 100u
#define MARKER_PASSES_NS 20000u /* how long to wait for a marker: on an idle device it completes within 5 to 10 us */
/*
 * Time after which a slice is requested for a process that counts as idle, although it made no call. It may have work:
 * without membarrier(2), a thread may begin a call unseen, if it checked just before the process counted as idle; and
 * another process may cause work here. No call would request a slice for such work. Further requests follow, each after
 * ten times as long (at most DOUBT_MAX_NS), until a call comes.
 */
#define DOUBT_NS 20000000u
#define DOUBT_MAX_NS 20000000000u
#define RESCUE_NS 500000000u
#define RESCUE_LOOK_NS 200000000u
#define RESCUE_STACK_BYTES (64 * 1024)

static struct {
    pthread_mutex_t lock;
    uint64_t *allow; /* the word `allow` that the launch path checks (launches.h) */
    bool active;     /* the process is under the engine cut; the rescue thread reads this word without the lock */
    bool watch;
    bool brief;
    bool idle;
    uint64_t quiet_ns; /* time without a call after which the process counts as idle */
    uint64_t idle_at;
    bool sampled; /* the last drain was begun while the program made calls */
    bool marked;  /* the last drain was begun after the program's last call */
    uint64_t looked_at;
    uint64_t busy_at;    /* time of the last check before the program stopped making calls */
    uint64_t sample_at;  /* earliest time of the next sample */
    uint64_t sampled_at; /* time of the last sample, or of the last check that found the process off the device */
    uint64_t calls;
    uint64_t doubt_at;
    uint64_t doubt_ns;
    bool guarded; /* the rescue thread exists */
    /*
     * for the rescue thread: when the process was found off its devices without an arbiter, or after the engine cut had
     * ended for it; 0: it is not in this state
     */
    uint64_t alone_at;
} cut = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void say(uint32_t kind, uint64_t idle_ns)
{
    struct vgpu_message message = {.kind = kind, .version = VGPU_LEASE_VERSION};
    message.turn.length_ns = idle_ns;
    message.turn.devices = vgpu_in_flight_declare();
    message.turn.sent_ns = now_ns();
    vgpu_link_send(&message); /* an error is ignored here: the link's thread notices a broken connection */
}

static void set_active(bool active)
{
    __atomic_store_n(&cut.active, active, __ATOMIC_SEQ_CST);
}

static void set_idle(bool idle)
{
    cut.idle = idle;
    vgpu_suspended_set(VGPU_SUSPENDED_IDLE, idle);
    /* A process without channels of its own stays on the slow path, which puts it under the gate. */
    bool looks = idle || vgpu_suspended_now() || !vgpu_channels_known();
    __atomic_store_n(cut.allow, looks ? 0 : UINT64_MAX, __ATOMIC_SEQ_CST);
}

void vgpu_cut_begin(uint32_t flags, uint64_t *allow)
{
    pthread_mutex_lock(&cut.lock);
    cut.watch = (flags & VGPU_TURN_WATCH) != 0;
    bool brief = (flags & VGPU_TURN_BRIEF) != 0;
    if (cut.brief != brief || cut.quiet_ns == 0)
        cut.quiet_ns = brief ? QUIET_BRIEF_NS : QUIET_NS;
    cut.brief = brief;
    cut.allow = allow;
    if (!cut.active) {
        vgpu_suspended_on_work(vgpu_cut_work);
        set_active(true);
        cut.marked = false;
        cut.sampled = false;
        cut.looked_at = cut.sampled_at = now_ns();
        cut.doubt_ns = DOUBT_NS;
        vgpu_suspended_set(VGPU_SUSPENDED_CUT, true);
        set_idle(vgpu_in_flight_none());
        if (!cut.idle)
            say(VGPU_MSG_WANT, 0);
    }
    pthread_mutex_unlock(&cut.lock);
}

void vgpu_cut_end(void)
{
    pthread_mutex_lock(&cut.lock);
    set_active(false);
    cut.idle = false;
    vgpu_suspended_set(VGPU_SUSPENDED_IDLE | VGPU_SUSPENDED_CUT, false);
    pthread_mutex_unlock(&cut.lock);
}

/*
 * Adapts the time after which the process counts as idle. A program that had work soon after it was reported idle was
 * reported too early; each such report costs orders of the arbiter.
 */
static void learn_quiet_time(void)
{
    uint64_t least = cut.brief ? QUIET_BRIEF_NS : QUIET_NS;
    uint64_t to = now_ns() - cut.idle_at < TOO_EARLY_NS ? 2 * cut.quiet_ns : cut.quiet_ns - cut.quiet_ns / 16;
    cut.quiet_ns = to < least ? least : to < QUIET_MAX_NS ? to : QUIET_MAX_NS;
}

/* Marks the process as working. Precondition: the lock is held. */
static void wake(void)
{
    set_idle(false);
    cut.marked = false;
    cut.looked_at = cut.sampled_at = now_ns();
    say(VGPU_MSG_WANT, 0);
}

void vgpu_cut_work(void)
{
    pthread_mutex_lock(&cut.lock);
    if (cut.active && cut.idle) {
        cut.doubt_ns = DOUBT_NS;
        learn_quiet_time();
        wake();
    } else if (cut.active) {
        set_idle(false);
    }
    pthread_mutex_unlock(&cut.lock);
}

bool vgpu_cut_idle(void)
{
    pthread_mutex_lock(&cut.lock);
    bool idle = cut.active && cut.idle;
    pthread_mutex_unlock(&cut.lock);
    return idle;
}

/*
 * While the process counts as idle: requests a slice when it is due (DOUBT_NS), in case the process has work that no
 * call announced. Returns the nanoseconds until the next check.
 */
static int64_t doubt(uint64_t now)
{
    if (vgpu_suspended_now())
        /* while suspended, the process's calls wait in libvgpu, so it has no work before it is resumed */
        cut.doubt_at = now + cut.doubt_ns;
    if (now < cut.doubt_at)
        return (int64_t)(cut.doubt_at - now);
    cut.doubt_ns = cut.doubt_ns < DOUBT_MAX_NS ? cut.doubt_ns * 10 : DOUBT_MAX_NS;
    wake();
    return WATCH_NS;
}

static void mark(void)
{
    vgpu_in_flight_use_all();
    vgpu_drain_begin();
}

/* Returns whether the marker that was just recorded has completed. Even on an idle device this takes a moment. */
static bool passes(void)
{
    uint64_t began = now_ns();
    bool done;
    while (!(done = vgpu_drain_done()) && now_ns() - began < MARKER_PASSES_NS)
        continue;
    return done;
}

/*
 * Records a sample for the time since the last one. A sample that finds work costs less than one that finds none, so
 * that it comes more often: counted alike, they would make the load look higher than it is.
 */
static void record(bool unfinished, bool waits, uint64_t now)
{
    uint64_t ms = (now - cut.sampled_at + SAMPLE_NS / 2) / SAMPLE_NS;
    ms = ms < 1 ? 1 : ms < SAMPLE_MAX_MS ? ms : SAMPLE_MAX_MS;
    vgpu_channels_sample(unfinished, waits, (uint32_t)ms);
    cut.sampled_at = now;
}

/*
 * Samples a process that keeps making calls: is some of its work unfinished? A thread that stays inside a call waits
 * for work. While the process is off the device, the answer is unknown, and no sample is taken.
 */
static void sample(uint64_t now, bool waits)
{
    if (now < cut.sample_at || vgpu_channels_off())
        return;
    bool unfinished = waits || (cut.sampled && !vgpu_drain_done());
    if (!unfinished) {
        mark();
        cut.sampled = true;
        unfinished = !passes();
    }
    record(unfinished, waits, now);
    uint64_t pause = (now_ns() - now) * SAMPLE_COSTS;
    cut.sample_at = now + (pause > SAMPLE_NS ? pause : SAMPLE_NS);
}

/* Returns true if there was no call for a while, no call is in progress, and all work has finished. */
static bool is_quiet(uint64_t now)
{
    bool inside;
    uint64_t looked_at = cut.looked_at;
    cut.looked_at = now;
    uint64_t calls = vgpu_inside_glance(&inside);
    if (calls == cut.calls && !inside)
        /* membarrier(2) interrupts the process's threads, so it is used only if the process seems to be idle */
        calls = vgpu_inside_read(&inside);
    bool same = calls == cut.calls;
    cut.calls = calls;
    if (!same || inside) {
        cut.marked = false;
        sample(now, same && inside);
        return false;
    }
    bool fresh = !cut.marked;
    if (fresh) {
        cut.busy_at = looked_at; /* the program's last call returned at some time between the two checks */
        mark();
        cut.marked = true;
        cut.sampled = false;
    }
    bool done = fresh ? passes() : vgpu_drain_done();
    if (now >= cut.sample_at && !vgpu_channels_off()) {
        record(!done, false, now);
        cut.sample_at = now + SAMPLE_NS;
    }
    return done && now - cut.busy_at >= cut.quiet_ns;
}

/*
 * Records the time since the last sample when the process becomes idle. No later sample covers this time, and the arbiter
 * counts the gaps of a tenant's work by its samples alone.
 */
static void sample_rest(uint64_t now)
{
    if (now - cut.sampled_at >= SAMPLE_NS / 2)
        record(false, false, now);
}

/* Returns whether no thread is in a call and none has entered one since the last check. */
static bool stays_quiet(void)
{
    bool inside;
    return vgpu_inside_read(&inside) == cut.calls && !inside;
}

bool vgpu_cut_look(int64_t *wait_ns)
{
    bool became = false;
    uint64_t now = now_ns();
    pthread_mutex_lock(&cut.lock);
    bool off = vgpu_channels_off();
    if (off)
        cut.sampled_at = now;
    if (cut.active && !vgpu_channels_known()) /* the process's channel table may have become too small */
        __atomic_store_n(cut.allow, 0, __ATOMIC_SEQ_CST);
    *wait_ns = off ? WATCH_OFF_NS : cut.brief ? WATCH_BRIEF_NS : WATCH_NS;
    if (!cut.active || (!cut.watch && !cut.idle && !vgpu_suspended_now())) {
        *wait_ns = -1;
    } else if (cut.idle) {
        *wait_ns = doubt(now);
    } else if (is_quiet(now)) {
        set_idle(true);
        became = stays_quiet();
        if (became) {
            sample_rest(now);
            vgpu_in_flight_idle();
            cut.idle_at = now;
            cut.doubt_at = now + cut.doubt_ns;
            say(VGPU_MSG_DONE, now - cut.busy_at);
        } else { /* a call began before set_idle(true), so it did not report itself */
            set_idle(false);
            cut.marked = false;
        }
    }
    pthread_mutex_unlock(&cut.lock);
    return became;
}

static bool put_back(void)
{
    uint8_t ids[VGPU_MAX_DEVICES][16] = {{0}};
    uint32_t count = vgpu_tenant_devices();
    for (uint32_t d = 0; d < count; d++) {
        char uuid[VGPU_UUID_BYTES];
        vgpu_tenant_uuid(d, uuid);
        (void)vgpu_uuid_parse(uuid, ids[d]); /* cannot fail: limits with an invalid UUID are refused at reading */
    }
    return vgpu_channels_enable((const uint8_t (*)[16])ids, count);
}

static void rescue(void)
{
    uint64_t now = now_ns();
    if (!vgpu_channels_off() || (__atomic_load_n(&cut.active, __ATOMIC_SEQ_CST) && vgpu_link_lives())) {
        cut.alone_at = 0;
    } else if (cut.alone_at == 0) {
        cut.alone_at = now;
    } else if (now - cut.alone_at >= RESCUE_NS) {
        cut.alone_at = put_back() ? 0 : now;
    }
}

static void *keep_rescuing(void *unused)
{
    (void)unused;
    for (;;) {
        pause_ns(RESCUE_LOOK_NS);
        rescue();
    }
    return NULL;
}

void vgpu_cut_guard(bool starts)
{
    if (!cut.guarded && starts)
        cut.guarded = vgpu_thread_start(keep_rescuing, NULL, RESCUE_STACK_BYTES, NULL);
    if (!cut.guarded)
        rescue();
}

void vgpu_cut_reset(void)
{
    memset(&cut, 0, sizeof(cut));
    pthread_mutex_init(&cut.lock, NULL);
}

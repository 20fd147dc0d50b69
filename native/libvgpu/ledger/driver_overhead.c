#include "driver_overhead.h"

#include <pthread.h>
#include <string.h>

#include "in_child.h"
#include "process_memory.h"
#include "source.h"
#include "tenant.h"
#include "thread.h"

#define LOOKS_MAX 20 /* maximum of measurements, of about 10 us each, while other threads allocate */
/*
 * number of synchronisations at which leftover memory is measured: not only the first, which may be of a stream that
 * does not free the memory
 */
#define LEFT_LOOKS 64

uint32_t vgpu_overhead_stale;
uint32_t vgpu_overhead_left;
uint64_t vgpu_overhead_moves;

static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
static uint64_t unseen[VGPU_MAX_DEVICES];
static uint64_t left_bytes[VGPU_MAX_DEVICES]; /* guarded by `looking`, like left_looks */
static uint32_t left_looks[VGPU_MAX_DEVICES];

struct state {
    uint64_t moves;
    uint64_t used;
    bool quiet; /* quiet: no call is between its claim and its settlement, or inside a free */
};

static struct state state_of(unsigned device, uint64_t claimed)
{
    const struct vgpu_account *account = vgpu_tenant_account();
    const struct vgpu_slot_device *own = &account->usage->slots[account->slot].devices[device];
    struct state state = {.moves = __atomic_load_n(&vgpu_overhead_moves, __ATOMIC_SEQ_CST),
                          .used = __atomic_load_n(&own->used_bytes, __ATOMIC_SEQ_CST)};
    state.quiet = __atomic_load_n(&own->claim_bytes, __ATOMIC_SEQ_CST) == claimed && (uint32_t)state.moves == 0;
    return state;
}

/*
 * Makes one measurement. Returns false if this process's figures changed meanwhile. *known is false if NVML has no
 * figure.
 */
static bool look(int device, uint64_t claimed, bool *known)
{
    uint64_t held;
    vgpu_sources_settle(device);
    struct state before = state_of((unsigned)device, claimed);
    *known = vgpu_process_memory((unsigned)device, &held);
    if (!*known)
        return true;
    bool same = vgpu_sources_settle(device);
    struct state after = state_of((unsigned)device, claimed);
    if (!same || !before.quiet || !after.quiet || before.moves != after.moves || before.used != after.used)
        return false;
    uint64_t hidden = __atomic_load_n(&unseen[device], __ATOMIC_SEQ_CST);
    uint64_t seen = after.used > hidden ? after.used - hidden : 0;
    vgpu_account_set_context(vgpu_tenant_account(), (unsigned)device, held > seen ? held - seen : 0);
    return true;
}

/*
 * Measures up to `looks` times. Returns whether a measurement succeeded. Precondition: the lock `looking` is held.
 * *known: NVML has a figure.
 */
static bool look_often(int device, uint64_t claimed, int looks, bool *known)
{
    bool done = false;
    *known = true;
    __atomic_fetch_and(&vgpu_overhead_stale, ~(1u << device), __ATOMIC_SEQ_CST);
    for (int i = 0; i < looks && !done; i++)
        done = look(device, claimed, known);
    if (!done)
        vgpu_overhead_later(device);
    return done && *known;
}

/*
 * Locks `looking` and makes the thread uncancellable: NVML opens and reads files, and a thread that is cancelled there
 * would keep the lock. *cancels is passed to let_look().
 */
static void keep_look(int *cancels)
{
    *cancels = vgpu_thread_keep();
    pthread_mutex_lock(&looking);
}

static void let_look(int cancels)
{
    pthread_mutex_unlock(&looking);
    vgpu_thread_release(cancels);
}

bool vgpu_overhead_look(int device, uint64_t claimed)
{
    bool known;
    int cancels;
    keep_look(&cancels);
    bool learnt = look_often(device, claimed, LOOKS_MAX, &known);
    let_look(cancels);
    return learnt;
}

void vgpu_overhead_look_once(int device)
{
    bool known;
    if (!vgpu_process_memory_ready())
        return;
    int cancels = vgpu_thread_keep();
    if (pthread_mutex_trylock(&looking) == 0) {
        look_often(device, 0, 1, &known);
        pthread_mutex_unlock(&looking);
    }
    vgpu_thread_release(cancels);
}

void vgpu_overhead_look_all(void)
{
    unsigned devices = vgpu_tenant_devices();
    for (unsigned device = 0; device < devices; device++)
        vgpu_overhead_look_once((int)device);
}

void vgpu_overhead_later(int device)
{
    __atomic_fetch_or(&vgpu_overhead_stale, 1u << device, __ATOMIC_SEQ_CST);
}

void vgpu_overhead_instead(int device, uint64_t bytes)
{
    pthread_mutex_lock(&looking);
    vgpu_account_to_context(vgpu_tenant_account(), (unsigned)device, bytes);
    left_bytes[device] += bytes;
    left_looks[device] = LEFT_LOOKS;
    __atomic_fetch_or(&vgpu_overhead_left, 1u << device, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&looking);
    vgpu_overhead_changed();
    vgpu_overhead_later(device);
}

/* Stops counting leftover bytes if NVML cannot measure them. Precondition: the lock `looking` is held. */
static void forget_left(int device)
{
    const struct vgpu_account *account = vgpu_tenant_account();
    uint64_t now = __atomic_load_n(&account->usage->slots[account->slot].devices[device].context_bytes,
                                   __ATOMIC_SEQ_CST);
    uint64_t kept = now > left_bytes[device] ? now - left_bytes[device] : 0;
    vgpu_account_set_context(vgpu_tenant_account(), (unsigned)device, kept);
    left_looks[device] = 0;
}

bool vgpu_overhead_leftovers(int device)
{
    bool known;
    if ((__atomic_load_n(&vgpu_overhead_left, __ATOMIC_RELAXED) >> device & 1) == 0)
        return false;
    int cancels;
    keep_look(&cancels);
    look_often(device, 0, LOOKS_MAX, &known);
    if (!known)
        forget_left(device);
    if (left_looks[device] == 0 || --left_looks[device] == 0) {
        left_bytes[device] = 0;
        __atomic_fetch_and(&vgpu_overhead_left, ~(1u << device), __ATOMIC_SEQ_CST);
    }
    let_look(cancels);
    return true;
}

bool vgpu_overhead_within_limit(int device)
{
    return vgpu_account_settled(vgpu_tenant_account()->usage, (unsigned)device) <= vgpu_tenant_limit((unsigned)device);
}

void vgpu_overhead_unseen(int device, int64_t bytes)
{
    __atomic_fetch_add(&unseen[device], (uint64_t)bytes, __ATOMIC_SEQ_CST);
}

static void reset(void)
{
    pthread_mutex_init(&looking, NULL);
    memset(unseen, 0, sizeof(unseen));
    memset(left_bytes, 0, sizeof(left_bytes));
    vgpu_overhead_left = 0;
    vgpu_overhead_stale = 0;
    vgpu_overhead_moves = 0;
}
VGPU_IN_CHILD(reset);

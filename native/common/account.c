#include "account.h"

#include "invariant.h"
#include "pause.h"

/*
 * LOOKS_MAX: how often a request that only other requests' claims prevent is checked before it is refused. The first
 * LOOKS_SOON checks take 4 to 8 ms in all, the later ones a quarter of a second. The later checks are needed because of
 * a process that moves bytes from its claim to its use: it counts the bytes twice for a moment, and may lose its
 * processor in that moment.
 */
#define LOOKS_SOON 64
#define LOOKS_MAX (LOOKS_SOON + 50)
#define LOOK_AGAIN_NS 10000L
#define LOOK_LATER_NS 5000000L

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void add(uint64_t *word, uint64_t bytes)
{
    __atomic_fetch_add(word, bytes, __ATOMIC_SEQ_CST);
}

/*
 * Subtracts bytes from a counter, but not below zero. The tenant can write the counters, and a counter that wrapped
 * around would make every further request fail.
 */
static void subtract(uint64_t *word, uint64_t bytes)
{
    uint64_t seen = load(word);
    uint64_t next;
    do {
        next = seen > bytes ? seen - bytes : 0;
    } while (!__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

static uint64_t plus(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

uint32_t vgpu_account_slots(const struct vgpu_usage *usage)
{
    uint32_t high = __atomic_load_n(&usage->slot_high, __ATOMIC_SEQ_CST);
    return high < VGPU_MAX_SLOTS ? high : VGPU_MAX_SLOTS;
}

static struct vgpu_slot_device *mine(struct vgpu_account *account, unsigned device)
{
    VGPU_ASSERT(account->slot < VGPU_MAX_SLOTS && device < VGPU_MAX_DEVICES);
    return &account->usage->slots[account->slot].devices[device];
}

/*
 * Sums the words of all slots. The words of a slot are read in the order in which bytes move between them (claim, use,
 * context), so that moving bytes may be counted twice but are not missed. Each has a statement of its own: C leaves the
 * order of the arguments of a call open.
 */
static void sums(const struct vgpu_usage *usage, unsigned device, uint64_t *settled, uint64_t *claimed)
{
    uint32_t high = vgpu_account_slots(usage);
    *settled = *claimed = 0;
    for (uint32_t i = 0; i < high; i++) {
        const struct vgpu_slot_device *d = &usage->slots[i].devices[device];
        *claimed = plus(*claimed, load(&d->claim_bytes));
        *settled = plus(*settled, load(&d->used_bytes));
        *settled = plus(*settled, load(&d->context_bytes));
    }
}

uint64_t vgpu_account_sum(const struct vgpu_usage *usage, unsigned device)
{
    uint64_t settled;
    uint64_t claimed;
    sums(usage, device, &settled, &claimed);
    return plus(settled, claimed);
}

uint64_t vgpu_account_settled(const struct vgpu_usage *usage, unsigned device)
{
    uint64_t settled;
    uint64_t claimed;
    sums(usage, device, &settled, &claimed);
    return settled;
}

static void note_peak(struct vgpu_slot_device *device)
{
    uint64_t now = plus(load(&device->used_bytes), load(&device->context_bytes));
    uint64_t peak = __atomic_load_n(&device->peak_bytes, __ATOMIC_RELAXED);
    while (now > peak &&
           !__atomic_compare_exchange_n(&device->peak_bytes, &peak, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/*
 * Adds bytes to the claim, then sums all slots. Returns true if the sum is within the limit; otherwise the claim is as
 * before.
 */
static bool try_add(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    if (bytes > limit) /* `limit` is at most INT64_MAX, so the claim does not overflow either */
        return false;
    uint64_t *claim = &mine(account, device)->claim_bytes;
    add(claim, bytes);
    if (vgpu_account_sum(account->usage, device) <= limit)
        return true;
    subtract(claim, bytes);
    return false;
}

/*
 * Repeats a request that only claims prevent, at most LOOKS_MAX times. Returns true if it is granted, and false as soon
 * as settled bytes prevent it. The first pauses depend on the slot's number (modulo 8), so that two processes seldom
 * try at the same time. Of several requests that would fit alone, the first to try again is granted.
 */
static bool reserve_slowly(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    for (uint32_t look = 0; look < LOOKS_MAX; look++) {
        uint64_t settled;
        uint64_t claimed;
        sums(account->usage, device, &settled, &claimed);
        if (settled > limit || bytes > limit - settled)
            return false;
        if (plus(settled, claimed) <= limit - bytes && try_add(account, device, bytes, limit))
            return true;
        vgpu_pause_ns(look < LOOKS_SOON ? (account->slot % 8 + 1) * LOOK_AGAIN_NS : LOOK_LATER_NS);
    }
    return false;
}

bool vgpu_account_reserve(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    if (try_add(account, device, bytes, limit))
        return true;
    pthread_mutex_lock(&account->slow);
    bool granted = reserve_slowly(account, device, bytes, limit);
    pthread_mutex_unlock(&account->slow);
    return granted;
}

void vgpu_account_settle(struct vgpu_account *account, unsigned device, uint64_t reserved, uint64_t kept)
{
    struct vgpu_slot_device *own = mine(account, device);
    VGPU_ASSERT(kept <= reserved);
    if (kept > 0) {
        add(&own->used_bytes, kept); /* adds the bytes before the claim is removed, so that they are always counted */
        note_peak(own);
    }
    subtract(&own->claim_bytes, reserved);
}

void vgpu_account_add(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    add(&mine(account, device)->used_bytes, bytes);
    note_peak(mine(account, device));
}

void vgpu_account_release(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    subtract(&mine(account, device)->used_bytes, bytes);
}

void vgpu_account_to_context(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    /* adds the bytes to context_bytes before it subtracts them from used_bytes, so that they are always counted */
    add(&mine(account, device)->context_bytes, bytes);
    subtract(&mine(account, device)->used_bytes, bytes);
}

void vgpu_account_set_context(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    __atomic_store_n(&mine(account, device)->context_bytes, bytes, __ATOMIC_SEQ_CST);
    note_peak(mine(account, device));
}

void vgpu_account_refused(struct vgpu_account *account, unsigned device)
{
    __atomic_fetch_add(&mine(account, device)->refusals_limit, 1, __ATOMIC_RELAXED);
}

void vgpu_account_card_full(struct vgpu_account *account, unsigned device)
{
    __atomic_fetch_add(&mine(account, device)->refusals_card, 1, __ATOMIC_RELAXED);
}

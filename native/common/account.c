#include "account.h"

#include <sched.h>

#define SPINS_MAX 256  /* sched_yield calls before an undecided request is refused */
#define SPINS_POLITE 128 /* of these, how many wait for lower slots; one of them may be stopped or dead */

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void add(uint64_t *word, uint64_t bytes)
{
    __atomic_fetch_add(word, bytes, __ATOMIC_SEQ_CST);
}

/* Subtraction that stops at zero: the page is writable by the tenant, and a wrapped counter would
 * lock it out for good. */
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

static uint32_t slots_in_use(const struct vgpu_usage *usage)
{
    uint32_t high = __atomic_load_n(&usage->slot_high, __ATOMIC_SEQ_CST);
    return high < VGPU_MAX_SLOTS ? high : VGPU_MAX_SLOTS;
}

static struct vgpu_slot_device *mine(struct vgpu_account *account, unsigned device)
{
    return &account->usage->slots[account->slot].devices[device];
}

uint64_t vgpu_account_sum(const struct vgpu_usage *usage, unsigned device)
{
    uint32_t high = slots_in_use(usage);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < high; i++) {
        const struct vgpu_slot_device *d = &usage->slots[i].devices[device];
        sum = plus(sum, plus(load(&d->used_bytes), load(&d->context_bytes)));
    }
    return sum;
}

static uint64_t claims_below(const struct vgpu_usage *usage, unsigned device, uint32_t slot_end)
{
    uint32_t high = slots_in_use(usage);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < high && i < slot_end; i++)
        sum = plus(sum, load(&usage->slots[i].devices[device].claim_bytes));
    return sum;
}

static bool fits(uint64_t sum, uint64_t bytes, uint64_t limit)
{
    return sum <= limit && bytes <= limit - sum;
}

/* Would the request fail even if everything that is in flight (its own claim aside) were undone? */
static bool hopeless(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t own_claim,
                     uint64_t limit)
{
    /* Claims are looked at on both sides of the sum: one may start just before it or end just after. */
    uint64_t before = claims_below(account->usage, device, VGPU_MAX_SLOTS);
    uint64_t sum = vgpu_account_sum(account->usage, device);
    uint64_t after = claims_below(account->usage, device, VGPU_MAX_SLOTS);
    uint64_t in_flight = before > after ? before : after;
    in_flight = in_flight > own_claim ? in_flight - own_claim : 0;
    return !fits(sum > in_flight ? sum - in_flight : 0, bytes, limit);
}

static void note_peak(struct vgpu_slot_device *device)
{
    uint64_t now = plus(load(&device->used_bytes), load(&device->context_bytes));
    uint64_t peak = __atomic_load_n(&device->peak_bytes, __ATOMIC_RELAXED);
    while (now > peak && !__atomic_compare_exchange_n(&device->peak_bytes, &peak, now, true,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

/* Adds, then looks: true if the sum with the bytes in it is within the limit, else nothing is kept. */
static bool try_add(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    add(&mine(account, device)->used_bytes, bytes);
    if (vgpu_account_sum(account->usage, device) <= limit)
        return true;
    subtract(&mine(account, device)->used_bytes, bytes);
    return false;
}

static bool reserve_slowly(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    for (int spin = 0; spin < SPINS_MAX; spin++) {
        if (fits(vgpu_account_sum(account->usage, device), bytes, limit)) {
            bool polite = spin < SPINS_POLITE && claims_below(account->usage, device, account->slot) > 0;
            if (!polite && try_add(account, device, bytes, limit))
                return true;
        } else if (hopeless(account, device, bytes, bytes, limit)) {
            return false;
        }
        sched_yield();
    }
    return false;
}

bool vgpu_account_reserve(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit)
{
    struct vgpu_slot_device *own = mine(account, device);
    bool granted = false;
    bool fits_now = fits(vgpu_account_sum(account->usage, device), bytes, limit);
    if (fits_now || !hopeless(account, device, bytes, 0, limit)) {
        add(&own->claim_bytes, bytes);
        granted = fits_now && try_add(account, device, bytes, limit);
        if (!granted) {
            pthread_mutex_lock(&account->slow);
            granted = reserve_slowly(account, device, bytes, limit);
            pthread_mutex_unlock(&account->slow);
        }
        subtract(&own->claim_bytes, bytes);
    }
    if (granted)
        note_peak(own);
    else
        __atomic_fetch_add(&own->refusals_limit, 1, __ATOMIC_RELAXED);
    return granted;
}

void vgpu_account_release(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    subtract(&mine(account, device)->used_bytes, bytes);
}

void vgpu_account_to_context(struct vgpu_account *account, unsigned device, uint64_t bytes)
{
    struct vgpu_slot_device *own = mine(account, device);
    add(&own->claim_bytes, bytes); /* the bytes count twice for a moment: others must not refuse on that */
    add(&own->context_bytes, bytes);
    subtract(&own->used_bytes, bytes);
    subtract(&own->claim_bytes, bytes);
}

void vgpu_account_drop_context(struct vgpu_account *account, unsigned device)
{
    __atomic_store_n(&mine(account, device)->context_bytes, 0, __ATOMIC_SEQ_CST);
}

void vgpu_account_card_full(struct vgpu_account *account, unsigned device)
{
    __atomic_fetch_add(&mine(account, device)->refusals_card, 1, __ATOMIC_RELAXED);
}

#include "unregistered.h"

#include <string.h>
#include <unistd.h>

#include "aside.h"
#include "dying.h"
#include "leases.h"
#include "looks.h"
#include "process.h"
#include "rest.h"
#include "usage_io.h"

/*
 * Number of looks, 100 ms apart, that must find a slot without a lock before it is cleared. A living process that
 * closed all its files locks its slot again before each attempt to register (arbiter_link.c), at most 100 ms apart. A
 * dying process is recognised by its pid, which is wrong if the process is in another pid namespace; the three looks
 * cover that case.
 */
#define LOOKS 3

#define WORD_BITS 64
#define SLOTS_A_READ 16

struct claimed {
    int usage_fd;
    uint64_t unlocked[VGPU_MAX_SLOTS / WORD_BITS]; /* slots of ended processes, as bits */
    bool dying;                                    /* a process without its lock is still dying */
};

static bool is_unlocked(const struct claimed *claimed, uint32_t slot)
{
    return (claimed->unlocked[slot / WORD_BITS] >> slot % WORD_BITS & 1) != 0;
}

static void look_at_slot(struct claimed *claimed, uint32_t index, const struct vgpu_slot *slot)
{
    if (slot->owner != VGPU_OWNER_SELF || usage_io_holder(claimed->usage_fd, index) != 0)
        return;
    if (vgpu_process_dying(slot->pid))
        claimed->dying = true;
    else
        claimed->unlocked[index / WORD_BITS] |= (uint64_t)1 << index % WORD_BITS;
}

/*
 * Finds claimed slots without a lock. The slots are read in blocks, so that the look takes less time: after three
 * expensive looks in a row a lease gets no further ones (rest.h).
 */
static void find_out(void *data)
{
    struct claimed *claimed = data;
    struct vgpu_slot slots[SLOTS_A_READ];
    for (uint32_t first = 0; first < VGPU_MAX_SLOTS; first += SLOTS_A_READ) {
        uint32_t count = usage_io_slots(claimed->usage_fd, first, slots, SLOTS_A_READ);
        for (uint32_t slot = first; slot < first + count; slot++)
            look_at_slot(claimed, slot, &slots[slot - first]);
    }
    close(claimed->usage_fd);
}

/* Finds unlocked slots on another thread. If the file cannot be opened, or the lease is shut (rest.h), finds none. */
static enum aside look(struct lease *lease, struct claimed *claimed)
{
    uint64_t took_ns;
    *claimed = (struct claimed){.usage_fd = lease->shut ? -1 : lease_open_to_read(lease)};
    if (claimed->usage_fd < 0)
        return ASIDE_DONE;
    enum aside done = aside(lease_tenant(lease), find_out, claimed, sizeof(*claimed), &took_ns);
    if (done == ASIDE_NOT_BEGUN)
        close(claimed->usage_fd);
    else
        rest_spent_on_look(lease, took_ns);
    return done;
}

/* Clears a slot if no process holds its lock. Returns false if the caller must try again later. */
static bool clear(struct lease *lease, uint32_t slot)
{
    if (!lease_hold(lease))
        return true;
    bool tried = process_clear(lease, slot);
    lease_release(lease);
    return tried;
}

bool unregistered_look(struct lease *lease)
{
    struct claimed claimed;
    if (look(lease, &claimed) != ASIDE_DONE)
        return !lease->shut;
    bool again = claimed.dying;
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS; slot++) {
        uint8_t before = lease->unlocked[slot];
        lease->unlocked[slot] = !is_unlocked(&claimed, slot) ? 0 : before < LOOKS ? before + 1 : LOOKS;
        if (lease->unlocked[slot] == LOOKS)
            looks_add(lease);
        again = again || lease->unlocked[slot] > 0;
    }
    return again;
}

bool unregistered_clear_one(struct lease *lease)
{
    const uint8_t *found = memchr(lease->unlocked, LOOKS, sizeof(lease->unlocked));
    if (found == NULL)
        return false;
    uint32_t slot = (uint32_t)(found - lease->unlocked);
    lease->unlocked[slot] = 0;
    if (!clear(lease, slot)) {
        lease->unlocked[slot] = LOOKS - 1;
        rest_look_later(lease);
    }
    return true;
}

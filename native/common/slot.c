#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "account.h"
#include "dying.h"
#include "invariant.h"

#define CONTEXT_WAIT_MS 2000
#define CONTEXT_LOOK_MS 2
/* how long to wait for the arbiter to clear slots: it usually needs less than 1 ms, but may run late on a busy host */
#define CLEAR_WAIT_MS 1000

static int set_lock_at(int fd, off_t offset, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1};
    return fcntl(fd, F_SETLK, &lock) == 0 ? 0 : -errno;
}

static off_t lock_offset(uint32_t slot)
{
    return (off_t)(offsetof(struct vgpu_usage, slots) + slot * sizeof(struct vgpu_slot));
}

static int set_lock(int fd, uint32_t slot, short type)
{
    return set_lock_at(fd, lock_offset(slot), type);
}

/*
 * Clears the words of a slot for each device, and then its owner word, so that a slot that is free has no counters of
 * its former owner.
 */
static void clear(struct vgpu_slot *slot)
{
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++) {
        uint64_t *words = (uint64_t *)&slot->devices[d];
        for (size_t w = 0; w < sizeof(slot->devices[d]) / sizeof(uint64_t); w++)
            __atomic_store_n(&words[w], 0, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&slot->owner, 0, __ATOMIC_SEQ_CST);
}

static void raise_high(struct vgpu_usage *usage, uint32_t slot)
{
    uint32_t high = __atomic_load_n(&usage->slot_high, __ATOMIC_SEQ_CST);
    while (high < slot + 1 &&
           !__atomic_compare_exchange_n(&usage->slot_high, &high, slot + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        continue;
}

static void own(struct vgpu_usage *usage, uint32_t index, uint64_t start_ns)
{
    VGPU_ASSERT(index < VGPU_MAX_SLOTS);
    struct vgpu_slot *slot = &usage->slots[index];
    raise_high(usage, index);
    slot->pid = getpid();
    slot->start_ns = start_ns;
    __atomic_store_n(&slot->owner, VGPU_OWNER_SELF, __ATOMIC_SEQ_CST);
}

static void take(struct vgpu_usage *usage, uint32_t index)
{
    struct timespec now;
    clear(&usage->slots[index]);
    clock_gettime(CLOCK_MONOTONIC, &now);
    own(usage, index, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
}

/*
 * Is the slot's process still dying, although no process holds the slot's lock? A pid that was recorded in another pid
 * namespace may name another process here. If that process is dying, the slot is cleared later.
 */
static bool still_there(const struct vgpu_slot *slot)
{
    return vgpu_process_dying(slot->pid);
}

int vgpu_slot_claim(int fd, struct vgpu_usage *usage)
{
    for (int pass = 0; pass < 2; pass++) { /* the first pass takes free slots, the second those of dead processes */
        for (uint32_t i = 0; i < VGPU_MAX_SLOTS; i++) {
            bool is_free = __atomic_load_n(&usage->slots[i].owner, __ATOMIC_SEQ_CST) == 0;
            if (is_free != (pass == 0))
                continue;
            int error = set_lock(fd, i, F_WRLCK);
            if (error == 0 && !is_free && still_there(&usage->slots[i])) {
                set_lock(fd, i, F_UNLCK);
                continue;
            }
            if (error == 0) {
                take(usage, i);
                return (int)i;
            }
            if (error != -EAGAIN && error != -EACCES)
                return error;
        }
    }
    return -EAGAIN;
}

int vgpu_slot_lock_again(int fd, struct vgpu_usage *usage, uint32_t index, uint64_t start_ns)
{
    struct vgpu_slot *slot = &usage->slots[index];
    int error = set_lock(fd, index, F_WRLCK);
    if (error != 0)
        return error;
    uint32_t owner = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST);
    if (owner != 0 && slot->start_ns != start_ns) /* another process took the slot meanwhile, and has died */
        clear(slot);
    if (owner == 0 || slot->start_ns != start_ns)
        own(usage, index, start_ns);
    return 0;
}

bool vgpu_slot_others(const struct vgpu_usage *usage, uint32_t own)
{
    uint32_t high = vgpu_account_slots(usage);
    for (uint32_t i = 0; i < high; i++)
        if (i != own && __atomic_load_n(&usage->slots[i].owner, __ATOMIC_SEQ_CST) != 0)
            return true;
    return false;
}

int vgpu_slot_clear_dead(int fd, struct vgpu_usage *usage, uint32_t own, bool registered)
{
    int cleared = 0;
    uint32_t high = vgpu_account_slots(usage);
    for (uint32_t i = 0; i < high; i++) {
        uint32_t owner = __atomic_load_n(&usage->slots[i].owner, __ATOMIC_SEQ_CST);
        if (i == own || owner == 0 || (owner != VGPU_OWNER_SELF && !registered))
            continue;
        if (set_lock(fd, i, F_WRLCK) != 0)
            continue;
        if (!still_there(&usage->slots[i])) {
            clear(&usage->slots[i]);
            cleared++;
        }
        set_lock(fd, i, F_UNLCK);
    }
    return cleared;
}

/*
 * Does no process hold the slot's lock? The arbiter locks a slot while it clears it. Its lock belongs to an open file
 * description, for which the kernel gives -1 as the pid (fcntl(2), F_GETLK).
 */
static bool no_process_locks(int fd, uint32_t slot)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = lock_offset(slot), .l_len = 1};
    return fcntl(fd, F_GETLK, &lock) == 0 && (lock.l_type == F_UNLCK || lock.l_pid == -1);
}

/*
 * Is the slot registered and its process dead or dying, so that the arbiter will clear it? A living process loses its
 * lock if it closes all its files, so its pid is checked too.
 */
static bool awaits_clear(int fd, const struct vgpu_usage *usage, uint32_t slot)
{
    uint32_t owner = __atomic_load_n(&usage->slots[slot].owner, __ATOMIC_SEQ_CST);
    return owner != 0 && owner != VGPU_OWNER_SELF && no_process_locks(fd, slot) &&
           vgpu_process_ended(usage->slots[slot].pid);
}

static uint32_t count_awaiting(int fd, const struct vgpu_usage *usage, uint32_t own)
{
    uint32_t count = 0;
    uint32_t high = vgpu_account_slots(usage);
    for (uint32_t i = 0; i < high; i++)
        count += i != own && awaits_clear(fd, usage, i);
    return count;
}

bool vgpu_slot_await_clear(int fd, const struct vgpu_usage *usage, uint32_t own)
{
    uint32_t first = count_awaiting(fd, usage, own);
    uint32_t now = first;
    for (int waited = 0; now > 0 && waited < CLEAR_WAIT_MS; waited++) {
        poll(NULL, 0, 1);
        now = count_awaiting(fd, usage, own);
    }
    return now < first;
}

bool vgpu_slot_lock_contexts(int fd)
{
    for (int waited = 0; waited < CONTEXT_WAIT_MS; waited += CONTEXT_LOOK_MS) {
        if (set_lock_at(fd, offsetof(struct vgpu_usage, context_mib), F_WRLCK) == 0)
            return true;
        poll(NULL, 0, CONTEXT_LOOK_MS);
    }
    return false;
}

void vgpu_slot_unlock_contexts(int fd)
{
    set_lock_at(fd, offsetof(struct vgpu_usage, context_mib), F_UNLCK);
}

/*
 * account.h: accounting of device memory across processes, without locks, that stays exact if a process is killed at
 * any instruction.
 *
 * There is no shared total. Each process adds and subtracts only in its own slot, and the total of a device is the sum
 * over all slots. So when the slot of a killed process is cleared, all of its bytes are gone from the total, and there
 * is no lock that a dead process could keep.
 *
 * Bytes are claimed before the driver is called and settled after the call. A claim counts in the total. After the
 * call, the bytes that the driver allocated are added to used_bytes before the claim is removed, so that they are
 * always counted. Bytes are subtracted only after the driver has freed them.
 *
 * Why the limit holds: a reservation first adds its bytes to its own slot and then sums all slots, both sequentially
 * consistent. Of any set of granted reservations, the one whose addition came last saw all the others in its sum, and
 * that sum was within the limit.
 *
 * A request that does not fit beside settled bytes is refused at once. If only claims of other requests prevent it, it
 * is tried again after pauses, a bounded number of times, because a claim may soon be taken back.
 *
 * Any thread of the process may call these functions. Preconditions: `device` is below VGPU_MAX_DEVICES and the slot
 * belongs to this process. Sizes are bytes. Other processes may write anything into the page, so a result is used only
 * as a number.
 */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/*
 * The account of one process: its slot in the lease's `usage`. `slow`: held by the thread that repeats a request, so
 * that one thread at a time does.
 */
struct vgpu_account {
    struct vgpu_usage *usage;
    uint32_t slot;
    pthread_mutex_t slow;
};

/* Returns n: only the slots 0 to n - 1 may be in use. */
uint32_t vgpu_account_slots(const struct vgpu_usage *usage);

/* Returns the bytes used on a device by all slots, contexts and claims included. Saturates at UINT64_MAX. */
uint64_t vgpu_account_sum(const struct vgpu_usage *usage, unsigned device);

/* Returns the bytes used on a device by all slots, without claims. */
uint64_t vgpu_account_settled(const struct vgpu_usage *usage, unsigned device);

/*
 * Claims `bytes` on a device if the sum then stays within `limit` bytes. Returns true if they were claimed. May sleep.
 */
bool vgpu_account_reserve(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit);

/* Ends a claim of `reserved` bytes. `kept` of these bytes stay counted as used. */
void vgpu_account_settle(struct vgpu_account *account, unsigned device, uint64_t reserved, uint64_t kept);

/* Counts bytes as used that the driver has allocated already, even beyond the limit. */
void vgpu_account_add(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Subtracts bytes from those that count as used, but not below zero. */
void vgpu_account_release(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Counts used bytes as the driver's own memory: they belong to no allocation any more, but the driver may keep them. */
void vgpu_account_to_context(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Sets the number of bytes of the driver's own memory in this process: contexts, modules, local memory, streams. */
void vgpu_account_set_context(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Counts a refused request: _refused if it exceeds the limit, _card_full if the driver refused it within the limit. */
void vgpu_account_refused(struct vgpu_account *account, unsigned device);
void vgpu_account_card_full(struct vgpu_account *account, unsigned device);

#endif

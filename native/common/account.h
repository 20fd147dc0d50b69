/*
 * account.h: crash-exact accounting of device memory across processes, without locks.
 *
 * There is no shared total. Each process adds and subtracts in its own slot only, and the total of
 * a device is the sum over all slots; so a process that is killed at any instruction takes its whole
 * share with it when its slot is cleared, and there is no lock that a dead holder can keep.
 *
 * Bytes are claimed before the driver is entered and settled after it: a claim counts in the total, and
 * what the driver made of it moves to used_bytes (in that order, so it is never uncounted). Bytes are given
 * back when the driver has freed them, never before.
 *
 * Why the limit holds: a reservation first adds its bytes to its own slot and then sums all slots,
 * both sequentially consistent. Of any set of reservations that were granted, the one whose add came
 * last saw all the others in its sum, and that sum was within the limit.
 *
 * A request that does not fit beside what is settled is refused at once. One that only claims stand in
 * the way of (they may be taken back in a moment) sleeps and looks again, a bounded number of times.
 *
 * Any thread of the process may call these functions: precondition, `device` is below VGPU_MAX_DEVICES and the slot is
 * the process's own. Sizes are bytes. Other processes may write anything into the page: no result is more than a
 * figure.
 */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/* The account of one process: its slot of the lease's `usage`. `slow` serialises its own threads. */
struct vgpu_account {
    struct vgpu_usage *usage;
    uint32_t slot;
    pthread_mutex_t slow;
};

/* Bytes used on a device by all slots, contexts and claims included; saturates at UINT64_MAX. */
uint64_t vgpu_account_sum(const struct vgpu_usage *usage, unsigned device);

/* The same without claims. */
uint64_t vgpu_account_settled(const struct vgpu_usage *usage, unsigned device);

/* Claims `bytes` on a device if the sum stays within `limit` bytes. */
bool vgpu_account_reserve(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit);

/* Ends a claim of `reserved` bytes; `kept` bytes of it (0: none) stay as used. */
void vgpu_account_settle(struct vgpu_account *account, unsigned device, uint64_t reserved, uint64_t kept);

/* Adds bytes that the driver holds already, even beyond the limit. */
void vgpu_account_add(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Gives used bytes back; never goes below zero. */
void vgpu_account_release(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Moves used bytes to the driver overhead: no allocation has them any more, but the driver may keep them. */
void vgpu_account_to_context(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Sets the driver's own memory in this process: contexts, modules, local memory, streams. */
void vgpu_account_set_context(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Counts a refused request: over the limit; or refused by the driver within the limit. */
void vgpu_account_refused(struct vgpu_account *account, unsigned device);
void vgpu_account_card_full(struct vgpu_account *account, unsigned device);

#endif

/*
 * account.h: crash-exact accounting of device memory across processes, without locks.
 *
 * There is no shared total. Each process adds and subtracts in its own slot only, and the total of
 * a device is the sum over all slots; so a process that is killed at any instruction takes its whole
 * share with it when its slot is cleared, and there is no lock that a dead holder can keep.
 *
 * Why the limit holds: a reservation first adds its bytes to its own slot and then sums all slots,
 * both sequentially consistent. Of any set of reservations that were granted, the one whose add came
 * last saw all the others in its sum, and that sum was within the limit.
 *
 * claim_bytes marks reservations that are in flight. It only decides who waits: a request that does
 * not fit because of bytes that may be taken back in a moment spins (bounded) instead of being
 * refused, and among requests in the slow path the lowest slot goes first, so that of several that
 * could fit alone one is granted.
 */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/* Where one process accounts: its slot of the lease's `usage`. `slow` serialises its own threads. */
struct vgpu_account {
    struct vgpu_usage *usage;
    uint32_t slot;
    pthread_mutex_t slow;
};

/* Bytes used on a device by all slots, contexts included; saturates at UINT64_MAX. */
uint64_t vgpu_account_sum(const struct vgpu_usage *usage, unsigned device);

/* Grants `bytes` on a device if the sum stays within `limit` bytes; counts a refusal otherwise. */
bool vgpu_account_reserve(struct vgpu_account *account, unsigned device, uint64_t bytes, uint64_t limit);

/* Gives bytes back; never goes below zero. */
void vgpu_account_release(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Turns granted bytes into context bytes (contexts, modules, local memory). */
void vgpu_account_to_context(struct vgpu_account *account, unsigned device, uint64_t bytes);

/* Gives back all context bytes of this process on a device. */
void vgpu_account_drop_context(struct vgpu_account *account, unsigned device);

/* The driver itself had no memory left for bytes that the limit allowed. */
void vgpu_account_card_full(struct vgpu_account *account, unsigned device);

#endif

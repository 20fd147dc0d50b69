/*
 * tenant.h: this process as a tenant: its lease, its slot, its limits.
 *
 * Any thread may call these functions. vgpu_tenant_enter and vgpu_tenant_reclaim are no cancellation points.
 */
#ifndef VGPU_TENANT_H
#define VGPU_TENANT_H

#include <stdbool.h>

#include "account.h"
#include "cuda_api.h"

/*
 * Is this process limited? Sets *limited. The first call looks for the lease; if there is one, it claims a slot and
 * registers. Returns CUDA_SUCCESS, or an error with which nothing may run: CUDA_ERROR_OPERATING_SYSTEM if the lease
 * cannot be read, is not valid, or libvgpu cannot start its thread; CUDA_ERROR_NO_DEVICE if HAMi's variables set limits
 * and there is no device; CUDA_ERROR_NOT_PERMITTED if the lease is closed; CUDA_ERROR_OUT_OF_MEMORY if it has as many
 * processes as a lease can have, or no slot can be locked. The error is not cached: the next call tries again.
 */
CUresult vgpu_tenant_enter_first(bool *limited);
enum vgpu_tenant_phase { VGPU_TENANT_COLD, VGPU_TENANT_UNLIMITED, VGPU_TENANT_LIMITED };
extern int vgpu_tenant_phase; /* enum vgpu_tenant_phase */
static inline CUresult vgpu_tenant_enter(bool *limited)
{
    int now = __atomic_load_n(&vgpu_tenant_phase, __ATOMIC_ACQUIRE);
    if (__builtin_expect(now == VGPU_TENANT_COLD, 0))
        return vgpu_tenant_enter_first(limited);
    *limited = now == VGPU_TENANT_LIMITED;
    return CUDA_SUCCESS;
}

/* Precondition of the functions below: vgpu_tenant_enter has set *limited to true. */

/* Returns the present memory limit of a device of the lease in bytes; 0 if the lease is closed. */
uint64_t vgpu_tenant_limit(unsigned device);

/* The number of devices in the lease, and the present UUID of one of them, which a move changes. */
unsigned vgpu_tenant_devices(void);
void vgpu_tenant_uuid(unsigned device, char uuid[VGPU_UUID_BYTES]);

/* Returns the folder of the lease. */
const char *vgpu_tenant_folder(void);

struct vgpu_account *vgpu_tenant_account(void);

/*
 * Clears the slots of dead processes that the arbiter does not clear: all if there is no arbiter, otherwise those of
 * processes that never registered (because of a seccomp filter). If it clears none, waits up to 1 s for the arbiter to
 * clear slots of ended registered processes. Returns true if any slot was cleared.
 */
bool vgpu_tenant_reclaim(void);

/* As vgpu_slot_lock_contexts and vgpu_slot_unlock_contexts, for this process's lease. */
bool vgpu_tenant_lock_contexts(void);
void vgpu_tenant_unlock_contexts(void);

#endif

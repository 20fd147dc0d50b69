/* Device memory of this process, counted in the process's own entry of the shared state. */
#include <unistd.h>

#include "internal.h"

uint64_t cu_round_page(uint64_t bytes)
{
    return (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
}

/*
 * Returns what an MPS server counts against a client's limit: all of its memory, and each context at its full cost
 * (measured: a limit of 1024 MiB leaves 480 MiB).
 */
static uint64_t mps_held(const struct cu_device *d)
{
    const struct sim_device *card = &cu.s->devices[d->device];
    uint64_t sum = d->use->contexts * card->context_bytes;
    for (int k = 0; k < SIM_KINDS; k++)
        if (k != SIM_CONTEXT)
            sum += d->use->bytes[k];
    return sum;
}

static bool fits(const struct cu_device *d, enum sim_kind kind, uint64_t bytes)
{
    uint64_t counted = kind == SIM_CONTEXT ? cu.s->devices[d->device].context_bytes : bytes;
    if (d->mps_limit > 0 && mps_held(d) + counted > d->mps_limit)
        return false;
    if (kind == SIM_MANAGED) /* managed memory that does not fit on the card goes to the host */
        return true;
    if (d->gi == SIM_NONE && bytes > sim_wall_left(cu.s, d->device, (uint32_t)getpid()))
        return false;
    uint64_t capacity = sim_capacity_bytes(cu.s, d->device, d->gi);
    if (bytes <= capacity && sim_used_bytes(cu.s, d->device, d->gi) <= capacity - bytes)
        return true;
    sim_sweep(cu.s);
    return bytes <= capacity && sim_used_bytes(cu.s, d->device, d->gi) <= capacity - bytes;
}

CUresult cu_charge(int ordinal, enum sim_kind kind, uint64_t bytes)
{
    struct cu_device *d = &cu.devices[ordinal];
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    CU_CHECK(d->use != NULL, CUDA_ERROR_INVALID_CONTEXT);
    cu_sim_lock();
    if (fits(d, kind, bytes)) {
        d->use->bytes[kind] += bytes;
        uint64_t now = sim_use_bytes(d->use);
        if (now > d->use->peak_bytes)
            d->use->peak_bytes = now;
        result = CUDA_SUCCESS;
    }
    sim_unlock(cu.s);
    return result;
}

void cu_uncharge(int ordinal, enum sim_kind kind, uint64_t bytes)
{
    struct sim_use *u = cu.devices[ordinal].use;
    if (u == NULL)
        return;
    cu_sim_lock();
    u->bytes[kind] -= bytes < u->bytes[kind] ? bytes : u->bytes[kind];
    sim_unlock(cu.s);
}

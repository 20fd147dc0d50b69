/* Device memory of this process, counted in the process's own entry of the shared state. */
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

static bool mps_admits(const struct cu_device *d, enum sim_kind kind, uint64_t bytes)
{
    uint64_t counted = kind == SIM_CONTEXT ? cu.s->devices[d->device].context_bytes : bytes;
    return d->mps_limit == 0 || mps_held(d) + counted <= d->mps_limit;
}

CUresult cu_charge(int ordinal, enum sim_kind kind, uint64_t bytes)
{
    struct cu_device *d = &cu.devices[ordinal];
    CU_CHECK(d->use != NULL, CUDA_ERROR_INVALID_CONTEXT);
    cu_sim_lock();
    bool taken = mps_admits(d, kind, bytes) && sim_use_take(cu.s, d->use, kind, bytes);
    sim_unlock(cu.s);
    return taken ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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

/* NVML's accounting: what a process used, kept after its end while the device's accounting mode is on. */
#include "state.h"

struct sim_account sim_account_of(const struct sim_proc *p, const struct sim_use *u)
{
    uint64_t lasted_us = sim_wall_us() - p->first_seen_us;
    double percent = lasted_us == 0 ? 0 : u->queue.done / 10.0 / (double)lasted_us;
    return (struct sim_account){.pid = p->pid,
                                .gpu_percent = percent > 100 ? 100 : (uint32_t)percent,
                                .peak_bytes = u->peak_bytes,
                                .started_us = p->first_seen_us,
                                .lasted_ms = lasted_us / 1000};
}

void sim_account_end(struct sim_state *s, const struct sim_proc *p)
{
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        const struct sim_use *u = &p->uses[i];
        if (!u->used || u->peak_bytes == 0)
            continue;
        struct sim_device *d = &s->devices[u->device];
        if (d->accounting)
            d->accounts[d->account_count++ % SIM_MAX_ACCOUNTS] = sim_account_of(p, u);
    }
}

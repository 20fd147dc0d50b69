/* Gives a process memory on a device, as the kernel part of the driver does. */
#include <unistd.h>

#include "state.h"

static bool has_room(struct sim_state *s, const struct sim_use *u, uint64_t bytes)
{
    uint64_t capacity = sim_capacity_bytes(s, u->device, u->gi);
    return bytes <= capacity && sim_used_bytes(s, u->device, u->gi) <= capacity - bytes;
}

bool sim_use_take(struct sim_state *s, struct sim_use *u, enum sim_kind kind, uint64_t bytes)
{
    if (kind != SIM_MANAGED) { /* managed memory that does not fit on the card goes to the host */
        if (u->gi == SIM_NONE && bytes > sim_wall_left(s, u->device, (uint32_t)getpid()))
            return false;
        if (!has_room(s, u, bytes)) {
            sim_sweep(s);
            if (!has_room(s, u, bytes))
                return false;
        }
    }
    u->bytes[kind] += bytes;
    uint64_t now = sim_use_bytes(u);
    if (now > u->peak_bytes)
        u->peak_bytes = now;
    return true;
}

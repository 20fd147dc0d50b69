/* Faults on demand: a driver function can fail, be slow, never return, or be missing. */
#include "state.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

static bool matches(const struct sim_fault *f, const char *function, int device)
{
    if (!f->used || (f->device_plus_one != 0 && (int)f->device_plus_one != device + 1))
        return false;
    size_t n = strlen(f->function);
    if (n > 0 && f->function[n - 1] == '*')
        return strncmp(f->function, function, n - 1) == 0;
    return strcmp(f->function, function) == 0;
}

static void delay(uint32_t microseconds)
{
    struct timespec t = {microseconds / 1000000, (long)(microseconds % 1000000) * 1000};
    nanosleep(&t, NULL);
}

int sim_fault_check(struct sim_state *s, const char *function, int device)
{
    struct sim_fault hit = {.used = 0};
    sim_lock(s);
    for (uint32_t i = 0; i < SIM_MAX_FAULTS && !hit.used; i++) {
        struct sim_fault *f = &s->faults[i];
        if (!matches(f, function, device) || f->remaining == 0)
            continue;
        hit = *f;
        if (f->remaining > 0 && --f->remaining == 0) {
            f->used = 0;
            atomic_fetch_sub(&s->fault_count, 1);
        }
    }
    sim_unlock(s);
    if (!hit.used)
        return 0;
    if (hit.action == SIM_FAULT_SLOW)
        delay(hit.delay_us);
    while (hit.action == SIM_FAULT_HANG) /* hangs until the process is killed or all faults are cleared */
    {
        delay(20000);
        if (atomic_load(&s->fault_count) == 0)
            return 0;
    }
    return hit.action == SIM_FAULT_ERROR || hit.action == SIM_FAULT_MISSING ? (int)hit.code : 0;
}

bool sim_fault_missing(struct sim_state *s, const char *function)
{
    bool missing = false;
    if (atomic_load_explicit(&s->fault_count, memory_order_relaxed) == 0)
        return false;
    sim_lock(s);
    for (uint32_t i = 0; i < SIM_MAX_FAULTS; i++)
        missing = missing || (s->faults[i].action == SIM_FAULT_MISSING && matches(&s->faults[i], function, -1));
    sim_unlock(s);
    return missing;
}

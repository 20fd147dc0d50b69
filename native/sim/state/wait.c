/* Waits until a queue reaches a position. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define SPIN_BELOW_NS 60000.0
#define LOOK_AGAIN_NS 5000000.0 /* interval of checks: other queues may join or leave during a wait */

static void sleep_until_on(struct sim_use *u, uint32_t seen)
{
    struct timespec t = {0, (long)LOOK_AGAIN_NS};
    syscall(SYS_futex, &u->on_wake, FUTEX_WAIT, seen, &t, NULL, 0);
}

void sim_engine_wait(struct sim_state *s, struct sim_use *u, double position)
{
    for (uint32_t looks = 1;; looks++) {
        uint32_t wake = atomic_load(&u->on_wake);
        double left = sim_engine_left(s, u, position);
        if (left <= 0 && left != SIM_STANDS)
            return;
        /* checks for dead processes, because the death of another process speeds this engine up */
        if (looks % 8 == 0) {
            sim_lock(s);
            sim_sweep(s);
            sim_unlock(s);
        }
        if (left == SIM_STANDS) {
            sleep_until_on(u, wake);
            continue;
        }
        if (left < SPIN_BELOW_NS)
            continue; /* spins: a sleep could end too late, because the kernel's timer slack is 50 us */
        left -= SPIN_BELOW_NS;
        if (left > LOOK_AGAIN_NS)
            left = LOOK_AGAIN_NS;
        struct timespec t = {0, (long)left};
        nanosleep(&t, NULL);
    }
}

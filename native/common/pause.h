/*
 * pause.h: a short sleep while another thread or process finishes a step.
 *
 * sched_yield(2) is not suitable. On a busy CPU each call costs the caller a whole time slice of the kernel's
 * scheduler, some 3 ms for each runnable task. On an idle CPU it returns at once, so a number of calls bounds no time.
 */
#ifndef VGPU_PAUSE_H
#define VGPU_PAUSE_H

#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/*
 * Sleeps for `ns` (below one second) plus the timer slack, 50 us by default. Unlike nanosleep(3) it is no cancellation
 * point, so the caller may hold locks. May return early (a signal, a system-call filter).
 */
static inline void vgpu_pause_ns(long ns)
{
    const struct timespec pause = {.tv_nsec = ns};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &pause, NULL);
}

#endif

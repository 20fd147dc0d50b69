/* wallclock.c: preloaded; the wall clock jumps back and forth by hours at each reading. */
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t jump(void)
{
    static unsigned looks;
    unsigned look = __atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED);
    return (time_t)(look % 7) * 3600 * (look % 2 == 0 ? 1 : -1);
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    long result = syscall(SYS_clock_gettime, id, now);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += jump();
    return (int)result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out != NULL)
        *out = exact.tv_sec;
    return exact.tv_sec;
}

#include "rest.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "aside.h"

#define TICK_NS 100000000
#define AGAIN_UNITS (RATE_BURST_UNITS / 4)
/*
 * number of consecutive long looks after which a lease gets no more; a single look may be long because a virtual
 * processor was descheduled
 */
#define LONG_LOOKS 3

static struct source timer = {.fd = -1};
static struct lease *ticking; /* leases that rest, or that the next tick looks at */
static struct lease *tick_at; /* the next lease of this tick; NULL: the tick is over */
static void (*on_tick)(struct lease *lease, bool look);

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Starts the timer if the list has a lease; stops it otherwise. */
static void arm(void)
{
    const struct timespec tick = {.tv_nsec = TICK_NS};
    struct itimerspec when = {0};
    if (ticking != NULL)
        when = (struct itimerspec){.it_interval = tick, .it_value = tick};
    timerfd_settime(timer.fd, 0, &when, NULL);
}

static void add(struct lease *lease)
{
    if (lease->ticks)
        return;
    lease->ticks = true;
    lease->ticking_next = ticking;
    ticking = lease;
    if (lease->ticking_next == NULL)
        arm();
}

static void begin(struct lease *lease)
{
    if (!lease->resting)
        loop_pause(&lease->listener);
    lease->resting = true;
    add(lease);
}

void rest_forget(struct lease *lease)
{
    struct lease **link = &ticking;
    while (*link != NULL && *link != lease)
        link = &(*link)->ticking_next;
    if (*link == NULL)
        return;
    *link = lease->ticking_next;
    if (tick_at == lease)
        tick_at = lease->ticking_next;
    lease->ticks = false;
    if (ticking == NULL)
        arm();
}

void rest_look_later(struct lease *lease)
{
    lease->look_later = true;
    add(lease);
}

static void tick_of(struct lease *lease)
{
    bool look = lease->look_later;
    lease->look_later = false;
    on_tick(lease, look);
    if (lease->resting && !lease->shut && rate_fill(&lease->rate, now_ns()) >= AGAIN_UNITS) {
        lease->resting = false;
        loop_resume(&lease->listener, EPOLLIN);
    }
    if (!lease->resting && !lease->look_later)
        rest_forget(lease);
}

/* Handles one lease in each turn of the loop. The timer is read after the last lease, and stays readable until then. */
static void tick(struct source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    struct lease *lease = tick_at != NULL ? tick_at : ticking;
    tick_at = lease != NULL ? lease->ticking_next : NULL;
    if (tick_at == NULL)
        (void)!read(source->fd, &count, sizeof(count));
    if (lease != NULL)
        tick_of(lease);
}

bool rest_afford(struct lease *lease, uint32_t units)
{
    bool left = rate_take(&lease->rate, units, now_ns()) && !lease->resting;
    if (!left)
        begin(lease);
    return left;
}

void rest_spent_on_look(struct lease *lease, uint64_t ns)
{
    lease->long_looks = ns > ASIDE_MAX_NS ? lease->long_looks + 1 : 0;
    if (lease->long_looks >= LONG_LOOKS)
        lease->shut = true;
    if (!rate_take(&lease->rate, (uint32_t)(ns / RATE_NS_PER_UNIT), now_ns()) || lease->shut)
        begin(lease);
}

int rest_open(void (*tick_for)(struct lease *lease, bool look))
{
    on_tick = tick_for;
    timer = (struct source){
        .fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), .slow = true, .ready = tick};
    return timer.fd < 0 ? -errno : loop_add(&timer, EPOLLIN);
}

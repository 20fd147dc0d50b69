/* Events of the node: a ring buffer, and a futex that wakes the processes that wait for the next event. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

void sim_post_event(struct sim_state *s, uint32_t device, int gi, int ci, uint64_t type, uint64_t data)
{
    uint64_t sequence = s->next_event;
    s->events[sequence % SIM_MAX_EVENTS] = (struct sim_event){sequence, type, data, device, gi, ci};
    __atomic_store_n(&s->next_event, sequence + 1, __ATOMIC_RELEASE);
    atomic_fetch_add(&s->event_wake, 1);
    syscall(SYS_futex, &s->event_wake, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void sim_event_sleep(struct sim_state *s, uint32_t seen, uint64_t most_ns)
{
    struct timespec t = {(time_t)(most_ns / 1000000000), (long)(most_ns % 1000000000)};
    syscall(SYS_futex, &s->event_wake, FUTEX_WAIT, seen, &t, NULL, 0);
}

#include "looks.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <unistd.h>

static STAILQ_HEAD(, lease) due = STAILQ_HEAD_INITIALIZER(due);
static struct source source = {.fd = -1, .slow = true}; /* an eventfd, readable while a look is due */
static bool (*look_at)(struct lease *lease);

void looks_add(struct lease *lease)
{
    const uint64_t one = 1;
    if (lease->look_due)
        return;
    if (STAILQ_EMPTY(&due))
        (void)!write(source.fd, &one, sizeof(one));
    lease->look_due = true;
    STAILQ_INSERT_TAIL(&due, lease, next_due);
}

void looks_forget(struct lease *lease)
{
    uint64_t count;
    if (!lease->look_due)
        return;
    lease->look_due = false;
    STAILQ_REMOVE(&due, lease, lease, next_due);
    if (STAILQ_EMPTY(&due))
        (void)!read(source.fd, &count, sizeof(count));
}

static void ready(struct source *self, uint32_t events)
{
    struct lease *lease = STAILQ_FIRST(&due);
    (void)self;
    (void)events;
    if (lease == NULL)
        return;
    looks_forget(lease);
    if (look_at(lease))
        looks_add(lease);
}

int looks_open(bool (*look_at_one)(struct lease *lease))
{
    look_at = look_at_one;
    source.ready = ready;
    source.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return source.fd < 0 ? -errno : loop_add(&source, EPOLLIN);
}

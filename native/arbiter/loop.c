#include "loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "untrusted.h"

#define BATCH 64

static void note_slow(struct source *source, uint32_t events);

static int epoll_fd = -1;
/* the epoll instance of the slow sources; epoll_fd watches it like any other source */
static struct source slow_sources = {.fd = -1, .ready = note_slow};
static bool slow_ready; /* a slow source of this turn has an event */
/*
 * a spare descriptor: if the process's descriptor table is full, loop_accept closes it for a moment, accepts the
 * connection in its place and closes the connection
 */
static int spare_fd = -1;
static struct source *dead_list;
static void (*after_batch)(void);

int loop_open(void)
{
    spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    slow_sources.fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 || spare_fd < 0 || slow_sources.fd < 0 ? -errno : loop_add(&slow_sources, EPOLLIN);
}

static int epoll_of(const struct source *source)
{
    return source->slow ? slow_sources.fd : epoll_fd;
}

int loop_add(struct source *source, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = source};
    return epoll_ctl(epoll_of(source), EPOLL_CTL_ADD, source->fd, &event) == 0 ? 0 : -errno;
}

int loop_hasten(struct source *source, uint32_t events)
{
    loop_pause(source);
    source->slow = false;
    return loop_add(source, events);
}

void loop_pause(struct source *source)
{
    epoll_ctl(epoll_of(source), EPOLL_CTL_DEL, source->fd, NULL);
}

void loop_resume(struct source *source, uint32_t events)
{
    (void)loop_add(source, events);
}

void loop_remove(struct source *source)
{
    if (source->dead)
        return;
    source->dead = 1;
    epoll_ctl(epoll_of(source), EPOLL_CTL_DEL, source->fd, NULL);
    untrusted_close(source->fd);
    source->fd = -1;
    source->next_dead = dead_list;
    dead_list = source;
}

static void bury(void)
{
    while (dead_list != NULL) {
        struct source *source = dead_list;
        dead_list = source->next_dead;
        source->destroy(source);
    }
}

void loop_after(void (*after)(void))
{
    after_batch = after;
}

static void note_slow(struct source *source, uint32_t events)
{
    (void)source;
    (void)events;
    slow_ready = true;
}

static void end_batch(void)
{
    bury();
    if (after_batch != NULL)
        after_batch();
}

static void serve_slow(void)
{
    struct epoll_event event;
    slow_ready = false;
    if (epoll_wait(slow_sources.fd, &event, 1, 0) != 1)
        return;
    struct source *slow = event.data.ptr;
    slow->ready(slow, event.events);
    end_batch();
}

int loop_run(void)
{
    struct epoll_event events[BATCH];
    for (;;) {
        int count = epoll_wait(epoll_fd, events, BATCH, -1);
        if (count < 0 && errno != EINTR)
            return -errno;
        for (int i = 0; i < count; i++) {
            struct source *source = events[i].data.ptr;
            if (!source->dead)
                source->ready(source, events[i].events);
        }
        end_batch();
        if (slow_ready) /* last, so that no message of this turn waits for the look */
            serve_slow();
    }
}

int loop_accept(int listen_fd)
{
    int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0 || (errno != EMFILE && errno != ENFILE))
        return fd >= 0 ? fd : -errno;
    close(spare_fd);
    fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        untrusted_close(fd);
    spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return -EMFILE;
}

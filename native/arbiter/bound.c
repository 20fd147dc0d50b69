#include "bound.h"

#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lease.h"
#include "served.h"

static struct source events = {.fd = -1};

static void cut(int usage_fd)
{
    struct stat about;
    if (fstat(usage_fd, &about) == 0 && about.st_size > (off_t)sizeof(struct vgpu_usage))
        (void)!ftruncate(usage_fd, sizeof(struct vgpu_usage));
}

static void look(struct source *source, uint32_t ready)
{
    _Alignas(struct inotify_event) char buffer[4096];
    ssize_t size = read(source->fd, buffer, sizeof(buffer));
    (void)ready;
    for (ssize_t at = 0; at < size;) {
        const struct inotify_event *event = (const struct inotify_event *)&buffer[at];
        struct lease *lease = lease_by_watch(event->wd); /* NULL: an event of before its end */
        if (lease != NULL && lease_hold(lease)) {
            cut(lease->usage_fd);
            lease_release(lease);
        }
        at += (ssize_t)(sizeof(*event) + event->len);
    }
}

int bound_open(void)
{
    events.fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    events.ready = look;
    return events.fd < 0 ? -errno : loop_add(&events, EPOLLIN);
}

int bound_begin(int usage_fd)
{
    char path[32];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", usage_fd);
    int watch = events.fd >= 0 ? inotify_add_watch(events.fd, path, IN_MODIFY) : -1;
    cut(usage_fd);
    return watch;
}

void bound_end(int watch)
{
    if (watch >= 0)
        inotify_rm_watch(events.fd, watch);
}

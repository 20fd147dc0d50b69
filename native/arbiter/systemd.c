#include "systemd.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "loop.h"
#include "untrusted.h"

static struct source timer;

static void notify(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path == NULL || path[0] == '\0' || strlen(path) >= sizeof(address.sun_path))
        return;
    memcpy(address.sun_path, path, strlen(path));
    if (path[0] == '@')
        address.sun_path[0] = '\0';
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
    sendto(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&address, size);
    close(fd);
}

static void beat(struct source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    (void)!read(source->fd, &count, sizeof(count));
    untrusted_renew();
    notify("WATCHDOG=1");
}

int systemd_watch_open(void)
{
    const char *text = getenv("WATCHDOG_USEC");
    uint64_t half_us = text != NULL ? strtoull(text, NULL, 10) / 2 : 0;
    if (half_us == 0)
        return 0;
    const struct timespec half = {.tv_sec = (time_t)(half_us / 1000000), .tv_nsec = (long)(half_us % 1000000 * 1000)};
    const struct itimerspec when = {.it_interval = half, .it_value = half};
    timer = (struct source){.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), .ready = beat};
    if (timer.fd < 0 || timerfd_settime(timer.fd, 0, &when, NULL) != 0)
        return -errno;
    return loop_add(&timer, EPOLLIN);
}

void systemd_ready(void)
{
    notify("READY=1");
}

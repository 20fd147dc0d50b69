#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define START_FIELD 22 /* number of the start time's field in /proc/PID/stat */

bool identity_alive(int pidfd)
{
    struct pollfd ended = {.fd = pidfd, .events = POLLIN};
    return poll(&ended, 1, 0) == 0;
}

/*
 * Reads the start time of a process; returns 0 or -errno. The command in brackets may contain any character, so the
 * fields are counted from the last bracket.
 */
static int started(pid_t pid, unsigned long *ticks)
{
    char text[1024];
    snprintf(text, sizeof(text), "/proc/%d/stat", (int)pid);
    int fd = open(text, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? -ESRCH : -errno;
    ssize_t size = read(fd, text, sizeof(text) - 1);
    int error = errno;
    close(fd);
    if (size <= 0)
        return size < 0 ? -error : -ESRCH;
    text[size] = '\0';
    const char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < START_FIELD; field++) {
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    *ticks = at != NULL ? strtoul(at, NULL, 10) : 0;
    return 0;
}

int identity_open(pid_t pid, unsigned long ticks)
{
    unsigned long since = 0;
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return errno == EINVAL ? -ESRCH : -errno; /* EINVAL: the pid now belongs to a thread */
    int error = started(pid, &since);
    if (error == 0 && since == ticks && identity_alive(pidfd))
        return pidfd;
    close(pidfd);
    return error == 0 ? -ESRCH : error;
}

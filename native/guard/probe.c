/*
 * Checks whether a daemon listens, by a connection that is closed at once: a connection that stays open and sends
 * nothing would block NVIDIA's daemon for all users (measured on 535 and 550).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "guard.h"

/*
 * Returns whether a daemon accepts a connection. A full backlog counts too: the daemon is there and slow. Sets
 * *wrong_type if the socket is of another type.
 */
static bool connects(const struct sockaddr_un *address, int type, bool *wrong_type)
{
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    bool there = connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 || errno == EAGAIN;
    *wrong_type = !there && errno == EPROTOTYPE;
    close(fd);
    return there;
}

bool guard_probe(const char *pipe, struct guard_life *life)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat found;
    bool wrong_type = false;
    int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/control", pipe);
    if (n < 0 || (size_t)n >= sizeof(address.sun_path) ||
        syscall(SYS_newfstatat, AT_FDCWD, address.sun_path, &found, 0) != 0)
        return false; /* stat(3) is not used, because C libraries before 2.33 do not export it */
    *life = (struct guard_life){found.st_dev, found.st_ino, found.st_ctim};
    if (connects(&address, SOCK_SEQPACKET, &wrong_type)) /* NVIDIA's daemon (535 and 550) uses this socket type */
        return true;
    return wrong_type && connects(&address, SOCK_STREAM, &wrong_type);
}

bool guard_same_life(const struct guard_life *a, const struct guard_life *b)
{
    return a->device == b->device && a->inode == b->inode && a->changed.tv_sec == b->changed.tv_sec &&
           a->changed.tv_nsec == b->changed.tv_nsec;
}

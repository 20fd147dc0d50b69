/*
 * counted.c: preloaded into the arbiter. Appends a letter to the file that VGPU_TEST_CALLS names, before the call:
 * q for a query or a test of a lock, e for an event that is read of inotify, g for a GRANT that is sent, t for a turn of
 * the event loop; and a after a connection is accepted. Tests count letters where a time would depend on the machine.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lease.h"

static int calls_fd = -1;

__attribute__((constructor)) static void open_calls(void)
{
    const char *path = getenv("VGPU_TEST_CALLS");
    if (path != NULL)
        calls_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void note(const char *letter)
{
    if (calls_fd >= 0)
        (void)!write(calls_fd, letter, 1);
}

int fcntl(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (command == F_GETLK || command == F_OFD_SETLK)
        note("q");
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds)
{
    if (milliseconds < 0)
        note("t");
    return (int)syscall(SYS_epoll_pwait, fd, events, most, milliseconds, NULL, 0);
}

ssize_t read(int fd, void *buffer, size_t size)
{
    if (size == sizeof(struct inotify_event))
        note("e");
    return syscall(SYS_read, fd, buffer, size);
}

ssize_t send(int fd, const void *message, size_t size, int flags)
{
    uint32_t kind = 0;
    if (size >= sizeof(kind))
        memcpy(&kind, message, sizeof(kind));
    if (kind == VGPU_MSG_GRANT)
        note("g");
    return syscall(SYS_sendto, fd, message, size, flags, NULL, 0);
}

int accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags)
{
    int accepted = (int)syscall(SYS_accept4, fd, peer, size, flags);
    if (accepted >= 0)
        note("a");
    return accepted;
}

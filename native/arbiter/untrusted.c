#include "untrusted.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* value in include/uapi/asm-generic/socket.h since Linux 6.16 */
#endif

static bool bounded;

static void ignore(int number)
{
    (void)number;
}

void untrusted_listen(int listen_fd)
{
    int pass = 0;
    if (bounded || setsockopt(listen_fd, SOL_SOCKET, SO_PASSRIGHTS, &pass, sizeof(pass)) == 0)
        return;
    /* the kernel interrupts no wait by a signal that has no handler */
    struct sigaction action = {.sa_handler = ignore, .sa_flags = SA_RESTART};
    bounded = sigaction(SIGALRM, &action, NULL) == 0;
}

/*
 * Interrupts the event loop's thread again and again, since a signal that comes before the wait does not end it. While
 * a signal is pending the kernel waits for no socket. Other threads of the arbiter block all signals.
 */
static void interrupt_every(suseconds_t us)
{
    const struct itimerval when = {.it_interval = {.tv_usec = us}, .it_value = {.tv_usec = us}};
    if (bounded)
        setitimer(ITIMER_REAL, &when, NULL);
}

ssize_t untrusted_recv(int fd, void *data, size_t size)
{
    struct iovec part = {.iov_base = data, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    interrupt_every(UNTRUSTED_WAIT_NS / 1000);
    ssize_t received = recvmsg(fd, &message, MSG_TRUNC);
    int error = errno;
    interrupt_every(0);
    errno = error;
    if (received < 0 || !(message.msg_flags & MSG_CTRUNC))
        return received;
    errno = EPERM;
    return -1;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t untrusted_close(int fd)
{
    if (!bounded) {
        close(fd);
        return 0;
    }
    uint64_t before = now_ns();
    interrupt_every(UNTRUSTED_WAIT_NS / 1000);
    close(fd);
    interrupt_every(0);
    return now_ns() - before;
}

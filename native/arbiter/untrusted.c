#include "untrusted.h"

#include <errno.h>
#include <poll.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "keeper.h"

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* value in include/uapi/asm-generic/socket.h since Linux 6.16 */
#endif

/*
 * Maximum of sockets that one keeper takes in all; then another keeper is started. The sockets whose close a tenant
 * delays add up in a keeper.
 */
#define KEEPER_MAX 100000u
#define KEEPER_SPARE 16u /* descriptors that a keeper needs for itself */
/*
 * How long the arbiter waits for a keeper that reads no messages. It does not wait for the keeper's end: a killed
 * keeper does not end while one of its threads waits in a close.
 */
#define KEEPER_ANSWER_MS 250

extern char **environ;

static bool may_pass;   /* the kernel cannot refuse descriptors */
static int keeper = -1; /* line to the keeper */
static rlim_t keeper_left;

/* by descriptor */
static struct entry {
    bool held; /* a keeper holds the socket; while there is no keeper: the next one must hold it */
    uint64_t user;
} *table;
static size_t table_room;

void untrusted_listen(int listen_fd)
{
    int pass = 0;
    if (setsockopt(listen_fd, SOL_SOCKET, SO_PASSRIGHTS, &pass, sizeof(pass)) != 0)
        may_pass = true;
}

static int spawn(int line, int pidfd)
{
    char *const argv[] = {"vgpu-keeper", "--keep", NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    pid_t pid;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, line, KEEPER_LINE);
    posix_spawn_file_actions_adddup2(&files, pidfd, KEEPER_HOLDER);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    int error = posix_spawn(&pid, "/proc/self/exe", &files, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return error;
}

static bool make_room(int fd)
{
    size_t room = table_room == 0 ? 1024 : table_room;
    while (room <= (size_t)fd)
        room *= 2;
    struct entry *grown = room == table_room ? table : realloc(table, room * sizeof(*table));
    if (grown == NULL)
        return false;
    memset(grown + table_room, 0, (room - table_room) * sizeof(*grown));
    table = grown;
    table_room = room;
    return true;
}

/* Closes the connection to the keeper, if there is one; that keeper then closes its sockets. Starts another keeper. */
static void start_keeper(void)
{
    int pair[2];
    struct rlimit limit;
    if (keeper >= 0)
        close(keeper);
    keeper = -1;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return;
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd < 0 || spawn(pair[1], pidfd) != 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        close(pair[0]);
    } else {
        keeper = pair[0];
        keeper_left = limit.rlim_cur < KEEPER_MAX + KEEPER_SPARE ? limit.rlim_cur - KEEPER_SPARE : KEEPER_MAX;
    }
    close(pair[1]);
    if (pidfd >= 0)
        close(pidfd);
}

static bool is_ready(short events, int milliseconds)
{
    struct pollfd line = {.fd = keeper, .events = events};
    return poll(&line, 1, milliseconds) > 0;
}

/*
 * Tells the keeper to hold fd as `number`, or if fd is -1, to drop `number`. Returns false if the keeper has ended or
 * reads no messages.
 */
static bool tell(int number, uint64_t user, int fd)
{
    struct keeper_message message = {.number = (uint64_t)number, .user = user};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = &message, .iov_len = sizeof(message)};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        header.msg_control = &control;
        header.msg_controllen = sizeof(control);
        struct cmsghdr *item = CMSG_FIRSTHDR(&header);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(item), &fd, sizeof(fd));
    }
    ssize_t sent;
    do
        sent = sendmsg(keeper, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && (errno == EINTR || (errno == EAGAIN && is_ready(POLLOUT, KEEPER_ANSWER_MS))));
    return sent == (ssize_t)sizeof(message);
}

static bool is_held(int fd)
{
    return keeper >= 0 && (size_t)fd < table_room && table[fd].held;
}

/* Has the keeper hold a socket of the table. Returns false if the keeper has ended, is full, or reads no messages. */
static bool hand_over(int fd)
{
    if (keeper_left == 0 || !tell(fd, table[fd].user, fd))
        return false;
    keeper_left--;
    return true;
}

/*
 * Starts another keeper, which then holds all sockets of the table. If that fails, there is no keeper, and no socket is
 * held.
 */
static void renew(void)
{
    start_keeper();
    for (size_t fd = 0; keeper >= 0 && fd < table_room; fd++) {
        if (table[fd].held && !hand_over((int)fd)) {
            close(keeper);
            keeper = -1;
        }
    }
}

void untrusted_renew(void)
{
    if (keeper >= 0 && is_ready(0, 0)) /* POLLHUP is always reported */
        renew();
}

void untrusted_hold(int fd, uint64_t user)
{
    if (!may_pass || is_held(fd) || !make_room(fd))
        return;
    if (!table[fd].held)
        table[fd] = (struct entry){.held = true, .user = user};
    if (keeper < 0 || !hand_over(fd))
        renew();
}

ssize_t untrusted_recv(int fd, void *data, size_t size)
{
    struct iovec part = {.iov_base = data, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!may_pass)
        return recv(fd, data, size, MSG_TRUNC);
    if (recvmsg(fd, &message, MSG_PEEK) < 0)
        return -1;
    if (message.msg_flags & MSG_CTRUNC) {
        errno = EPERM;
        return -1;
    }
    return recv(fd, data, size, MSG_TRUNC);
}

void untrusted_close(int fd)
{
    untrusted_renew();
    /* gives the keeper a copy if it has none yet, for instance of a listener that accepted no connection */
    untrusted_hold(fd, UINT64_MAX);
    bool held = is_held(fd);
    if (held)
        /* ends the connection for the tenant: a close alone would not, because the keeper has a copy */
        shutdown(fd, SHUT_RDWR);
    if ((size_t)fd < table_room)
        table[fd].held = false;
    close(fd);
    if (held && !tell(fd, 0, -1))
        renew();
}

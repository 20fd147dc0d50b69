#include "untrusted.h"

#include <errno.h>
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

/* Sockets that one keeper takes; then another one is started, since those that tenants keep from closing add up. */
#define KEEPER_MAX 100000u
#define KEEPER_SPARE 64u /* descriptors that a keeper needs for itself */

extern char **environ;

static bool may_pass;   /* the kernel cannot refuse descriptors */
static int keeper = -1; /* line to the keeper that takes sockets now */
static rlim_t keeper_left;

/* by descriptor */
static struct entry {
    int line;      /* of a socket: 1 + the line to its keeper; 0: none holds it */
    uint32_t held; /* of a line: the sockets that its keeper holds */
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

/* Closes a line that is used no more. Its keeper ends when the kernel has closed its sockets. */
static void leave(int line)
{
    if (line != keeper && table[line].held == 0)
        close(line);
}

/* Starts a keeper for the sockets from now on. The keeper before it keeps what it holds. */
static void start_keeper(void)
{
    int pair[2];
    int before = keeper;
    struct rlimit limit;
    keeper = -1;
    if (before >= 0)
        leave(before);
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return;
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd < 0 || !make_room(pair[0]) || spawn(pair[1], pidfd) != 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        close(pair[0]);
    } else {
        keeper = pair[0];
        keeper_left = limit.rlim_cur < KEEPER_MAX + KEEPER_SPARE ? limit.rlim_cur - KEEPER_SPARE : KEEPER_MAX;
    }
    close(pair[1]);
    if (pidfd >= 0)
        close(pidfd);
}

/* Tells the keeper that it is to hold fd, or without one that it is to drop `number`. */
static bool tell(int line, uint64_t number, uint64_t user, int fd)
{
    struct keeper_message message = {.number = number, .user = user};
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
        sent = sendmsg(line, &header, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof(message);
}

static bool is_held(int fd)
{
    return (size_t)fd < table_room && table[fd].line != 0;
}

void untrusted_hold(int fd, uint64_t user)
{
    if (!may_pass || is_held(fd) || !make_room(fd))
        return;
    for (int tries = 0; tries < 2; tries++) { /* the keeper may have been killed */
        if (keeper < 0 || keeper_left == 0 || tries > 0)
            start_keeper();
        if (keeper >= 0 && tell(keeper, (uint64_t)fd, user, fd)) {
            keeper_left--;
            table[fd].line = 1 + keeper;
            table[keeper].held++;
            return;
        }
    }
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
    untrusted_hold(fd, UINT64_MAX); /* if nothing holds it, such as a listener that accepted no connection */
    if (!is_held(fd)) {
        close(fd);
        return;
    }
    int line = table[fd].line - 1;
    table[fd].line = 0;
    table[line].held--;
    shutdown(fd, SHUT_RDWR); /* the tenant sees the end, although the keeper has a copy */
    close(fd);
    (void)tell(line, (uint64_t)fd, 0, -1);
    leave(line);
}

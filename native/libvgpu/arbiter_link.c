#include "arbiter_link.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_MS_MIN 20
#define RETRY_MS_MAX 100
#define STACK_BYTES (128 * 1024)

static struct {
    struct sockaddr_un address;
    struct vgpu_usage *usage;
    uint32_t slot;
    int fd;
    dev_t device; /* of the socket: a program that closes all descriptors may reuse the number */
    ino_t inode;
    int32_t host_pid;
} line = {.fd = -1};

static bool still_ours(int fd)
{
    struct stat about;
    return fstat(fd, &about) == 0 && about.st_dev == line.device && about.st_ino == line.inode;
}

/* One SEQPACKET connection whose calls are all bounded; -errno if nobody listens. */
static int dial(void)
{
    struct timeval wait = {.tv_usec = VGPU_LINK_WAIT_MS * 1000};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    if (connect(fd, (struct sockaddr *)&line.address, sizeof(line.address)) == 0)
        return fd;
    int error = errno;
    close(fd);
    return -error;
}

static void note_welcome(const struct vgpu_message *reply)
{
    __atomic_store_n(&line.host_pid, (int32_t)reply->value, __ATOMIC_RELAXED);
    __atomic_store_n(&line.usage->slots[line.slot].owner, reply->owner, __ATOMIC_SEQ_CST);
}

/* Registers on a fresh connection. 0: line.fd is up; -ESHUTDOWN: closed lease; other -errno: not now. */
static int register_once(void)
{
    struct vgpu_message message = {
        .kind = VGPU_MSG_REGISTER, .version = VGPU_LEASE_VERSION, .slot = line.slot};
    struct stat about;
    int fd = dial();
    if (fd < 0)
        return fd;
    int error = -EPROTO;
    if (send(fd, &message, sizeof(message), MSG_NOSIGNAL) != (ssize_t)sizeof(message) ||
        recv(fd, &message, sizeof(message), 0) != (ssize_t)sizeof(message) || fstat(fd, &about) != 0)
        error = -EAGAIN;
    else if (message.kind == VGPU_MSG_WELCOME && message.slot == line.slot && message.owner != 0)
        error = 0;
    else if (message.kind == VGPU_MSG_REFUSED && message.value == ESHUTDOWN)
        error = -ESHUTDOWN;
    if (error != 0) {
        close(fd);
        return error;
    }
    note_welcome(&message);
    line.device = about.st_dev;
    line.inode = about.st_ino;
    __atomic_store_n(&line.fd, fd, __ATOMIC_SEQ_CST);
    return 0;
}

/* Waits, for as long as it takes, until the arbiter is gone. It sends nothing in this version. */
static void wait_until_gone(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    char byte;
    while (poll(&poll_fd, 1, -1) >= 0 || errno == EINTR) {
        if ((poll_fd.revents & (POLLNVAL | POLLERR)) || !still_ours(fd))
            break;
        if (recv(fd, &byte, sizeof(byte), MSG_DONTWAIT) == 0)
            break;
    }
    __atomic_store_n(&line.fd, -1, __ATOMIC_SEQ_CST);
    if (still_ours(fd))
        close(fd);
}

static void *keep(void *unused)
{
    int pause_ms = RETRY_MS_MIN;
    (void)unused;
    for (;;) {
        int fd = __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST);
        if (fd >= 0) {
            wait_until_gone(fd);
            pause_ms = RETRY_MS_MIN;
        }
        if (register_once() != 0) {
            poll(NULL, 0, pause_ms);
            pause_ms = pause_ms * 2 < RETRY_MS_MAX ? pause_ms * 2 : RETRY_MS_MAX;
        }
    }
    return NULL;
}

/* The thread takes no signal of the program's: all are blocked in it from its first instruction. */
static void start_thread(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    (void)pthread_create(&thread, &attributes, keep, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void set_address(const char *folder)
{
    line.address.sun_family = AF_UNIX;
    int length = snprintf(line.address.sun_path, sizeof(line.address.sun_path), "%s/%s", folder,
                          VGPU_ARBITER_SOCKET);
    if (length >= (int)sizeof(line.address.sun_path)) /* too long a path: this process goes unregistered */
        line.address.sun_path[0] = '\0';
}

int vgpu_link_start(const char *folder, struct vgpu_usage *usage, uint32_t slot)
{
    set_address(folder);
    line.usage = usage;
    line.slot = slot;
    if (line.address.sun_path[0] == '\0')
        return 0;
    if (register_once() == -ESHUTDOWN)
        return -ESHUTDOWN;
    start_thread();
    return 0;
}

int vgpu_link_up(void)
{
    return __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST) >= 0;
}

int32_t vgpu_link_host_pid(void)
{
    int32_t pid = __atomic_load_n(&line.host_pid, __ATOMIC_RELAXED);
    return pid > 0 ? pid : getpid();
}

void vgpu_link_reset_after_fork(void)
{
    if (line.fd >= 0 && still_ours(line.fd))
        close(line.fd);
    line.fd = -1;
    line.host_pid = 0;
}

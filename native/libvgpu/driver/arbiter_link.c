#include "arbiter_link.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "descriptor.h"
#include "in_child.h"
#include "slot_lock.h"
#include "thread.h"

#define RETRY_MS_MIN 20
#define RETRY_MS_MAX 100
/* interval of checking the connection, because poll does not return for a descriptor that the program closed */
#define LOOK_NS 250000000
#define STACK_BYTES (128 * 1024)

static struct {
    struct sockaddr_un address;
    struct vgpu_usage *usage;
    uint32_t slot;
    int fd;
    dev_t device; /* identity of the socket: a program that closes all descriptors may reuse its number */
    ino_t inode;
    int32_t host_pid;
} line = {.fd = -1};

/* The linker's symbol for the beginning of section vgpu_link_listener. */
extern const struct vgpu_link_listener *const __start_vgpu_link_listener[] __attribute__((visibility("hidden")));

static const struct vgpu_link_listener *listener(void)
{
    return __start_vgpu_link_listener[0];
}

static bool is_same(int fd, const struct stat *socket)
{
    struct stat about;
    return fstat(fd, &about) == 0 && about.st_dev == socket->st_dev && about.st_ino == socket->st_ino;
}

static bool still_ours(int fd)
{
    const struct stat socket = {.st_dev = line.device, .st_ino = line.inode};
    return is_same(fd, &socket);
}

/*
 * Closes the descriptor if it is still the socket. The program may have closed the socket and use its number for
 * another file.
 */
static void close_same(int fd, const struct stat *socket)
{
    if (is_same(fd, socket))
        close(fd);
}

/*
 * Opens a SEQPACKET connection to the arbiter, and reads its fstat data. Each call on the connection waits at most
 * VGPU_LINK_WAIT_MS. Returns the descriptor, or -errno.
 */
static int dial(struct stat *about)
{
    struct timeval wait = {.tv_usec = VGPU_LINK_WAIT_MS * 1000};
    int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int fd = made < 0 ? -errno : vgpu_above_stdio(made);
    if (fd < 0 || fstat(fd, about) != 0)
        return fd < 0 ? fd : -EBADF;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    if (connect(fd, (struct sockaddr *)&line.address, sizeof(line.address)) == 0)
        return fd;
    int error = errno;
    close_same(fd, about);
    return -error;
}

static void note_welcome(const struct vgpu_message *reply)
{
    __atomic_store_n(&line.host_pid, (int32_t)reply->value, __ATOMIC_RELAXED);
    __atomic_store_n(&line.usage->slots[line.slot].owner, reply->owner, __ATOMIC_SEQ_CST);
}

/*
 * Registers on a new connection. Returns 0, and sets line.fd; -ESHUTDOWN if the lease is closed; another -errno if the
 * caller must try again later.
 */
static int register_once(void)
{
    struct vgpu_message message = {.kind = VGPU_MSG_REGISTER, .version = VGPU_LEASE_VERSION, .slot = line.slot};
    struct stat about;
    /* the slot is locked again first, because a restarted arbiter finds processes only by their locks */
    (void)vgpu_slot_lock_hold();
    int fd = dial(&about);
    if (fd < 0)
        return fd;
    int error = -EPROTO;
    if (send(fd, &message, sizeof(message), MSG_NOSIGNAL) != (ssize_t)sizeof(message) ||
        recv(fd, &message, sizeof(message), 0) != (ssize_t)sizeof(message))
        error = -EAGAIN;
    else if (message.kind == VGPU_MSG_WELCOME && message.slot == line.slot && message.owner != 0)
        error = 0;
    else if (message.kind == VGPU_MSG_REFUSED && message.value == ESHUTDOWN)
        error = -ESHUTDOWN;
    if (error != 0) {
        close_same(fd, &about);
        return error;
    }
    note_welcome(&message);
    line.device = about.st_dev;
    line.inode = about.st_ino;
    __atomic_store_n(&line.fd, fd, __ATOMIC_SEQ_CST);
    return 0;
}

/*
 * Waits as wait_for_line does, but in a receive. The kernel refuses poll(2) of more descriptors than RLIMIT_NOFILE,
 * which the program may set to 0 when it has opened all that it needs. A receive has no such limit.
 */
static bool wait_by_receive(int fd, int64_t ns)
{
    char first;
    int64_t us = ns / 1000 > 1000 ? ns / 1000 : 1000; /* a timeout of 0 would mean no timeout */
    struct timeval wait = {.tv_sec = (time_t)(us / 1000000), .tv_usec = (suseconds_t)(us % 1000000)};
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) != 0)
        return usleep(1000) == 0;
    return recv(fd, &first, sizeof(first), MSG_PEEK) >= 0 || (errno != EAGAIN && errno != EINTR);
}

/*
 * Waits up to `ns`. Returns true if the connection is readable or broken. If a seccomp filter refuses ppoll(2), poll(2)
 * is used, which waits in milliseconds.
 */
static bool wait_for_line(int fd, int64_t ns)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    struct timespec wait = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    int ready = ppoll(&poll_fd, fd >= 0 ? 1 : 0, &wait, NULL);
    if (ready < 0 && (errno == EPERM || errno == ENOSYS))
        ready = poll(&poll_fd, fd >= 0 ? 1 : 0, (int)(ns / 1000000) + 1);
    if (ready < 0 && errno == EINVAL && fd >= 0)
        return wait_by_receive(fd, ns);
    return ready > 0;
}

enum taken { TAKEN, NOTHING, BROKEN };

static enum taken take_message(int fd)
{
    struct vgpu_message message;
    if (!still_ours(fd))
        return BROKEN;
    ssize_t size = recv(fd, &message, sizeof(message), MSG_DONTWAIT);
    if (size != (ssize_t)sizeof(message))
        return size >= 0 || (errno != EAGAIN && errno != EINTR) ? BROKEN : NOTHING;
    listener()->message(&message);
    return TAKEN;
}

/* Serves the listener until the connection to the arbiter ends. */
static void serve(int fd)
{
    listener()->linked();
    for (enum taken taken = TAKEN; taken != BROKEN;) {
        int64_t wait = listener()->tick();
        if (!wait_for_line(fd, wait >= 0 && wait < LOOK_NS ? wait : LOOK_NS) && still_ours(fd))
            continue;
        taken = take_message(fd);
    }
    __atomic_store_n(&line.fd, -1, __ATOMIC_SEQ_CST);
    listener()->unlinked();
    if (still_ours(fd))
        close(fd);
}

/* Calls the listener's tick for `ns` while there is no arbiter. Afterwards the caller looks for an arbiter again. */
static void live_alone(int64_t ns)
{
    while (ns > 0) {
        int64_t wait = listener()->tick();
        wait = wait < 0 || wait > ns ? ns : wait;
        wait_for_line(-1, wait);
        ns -= wait > 1000 ? wait : 1000;
    }
}

static void *keep(void *unused)
{
    int pause_ms = RETRY_MS_MIN;
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1000UL); /* sets the timer slack of this thread, so that slices end on time */
    for (;;) {
        int fd = __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST);
        if (fd >= 0) {
            serve(fd);
            pause_ms = RETRY_MS_MIN;
        }
        if (register_once() != 0) {
            live_alone((int64_t)pause_ms * 1000000);
            pause_ms = pause_ms * 2 < RETRY_MS_MAX ? pause_ms * 2 : RETRY_MS_MAX;
        }
    }
    return NULL;
}

static void set_address(const char *folder)
{
    line.address.sun_family = AF_UNIX;
    int length = snprintf(line.address.sun_path, sizeof(line.address.sun_path), "%s/%s", folder, VGPU_ARBITER_SOCKET);
    if (length >= (int)sizeof(line.address.sun_path)) /* the path is too long, so this process is not registered */
        line.address.sun_path[0] = '\0';
}

static void drop_line(void)
{
    if (line.fd >= 0 && still_ours(line.fd))
        close(line.fd);
    line.fd = -1;
}

int vgpu_link_start(const char *folder, struct vgpu_usage *usage, uint32_t slot)
{
    set_address(folder);
    line.usage = usage;
    line.slot = slot;
    if (!listener()->start(folder, usage, slot))
        return -EIO;
    int error = line.address.sun_path[0] != '\0' ? register_once() : -ENAMETOOLONG;
    if (error == -ESHUTDOWN)
        return -ESHUTDOWN;
    if (error != 0)
        listener()->unlinked();
    if (vgpu_thread_start(keep, NULL, STACK_BYTES, NULL))
        return 0;
    drop_line();
    return -EAGAIN;
}

bool vgpu_link_send(const struct vgpu_message *message)
{
    int fd = __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST);
    return fd >= 0 && still_ours(fd) &&
           send(fd, message, sizeof(*message), MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(*message);
}

void vgpu_link_hang_up(void)
{
    int fd = __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST);
    if (fd >= 0 && still_ours(fd))
        shutdown(fd, SHUT_RDWR);
}

int vgpu_link_up(void)
{
    return __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST) >= 0;
}

bool vgpu_link_lives(void)
{
    char first;
    int fd = __atomic_load_n(&line.fd, __ATOMIC_SEQ_CST);
    struct pollfd about = {.fd = fd};
    if (fd < 0 || !still_ours(fd))
        return false;
    if (poll(&about, 1, 0) >= 0)
        return (about.revents & (POLLHUP | POLLERR)) == 0;
    return recv(fd, &first, sizeof(first), MSG_PEEK | MSG_DONTWAIT) != 0; /* poll(2) was refused: see wait_by_receive */
}

int32_t vgpu_link_host_pid(void)
{
    int32_t pid = __atomic_load_n(&line.host_pid, __ATOMIC_RELAXED);
    return pid > 0 ? pid : getpid();
}

static void reset(void)
{
    drop_line();
    line.host_pid = 0;
}
VGPU_IN_CHILD(reset);

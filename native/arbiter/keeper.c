#include "keeper.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STACK_BYTES 65536
/*
 * How long the keeper waits before it closes a socket. The holder (the process for which the keeper holds sockets) may
 * still have a copy while it ends, and so may its child between fork(2) and exec(2). Neither must be the last to close
 * the socket.
 */
#define SETTLE_S 1

struct held {
    struct keeper_message message;
    int fd;
};

struct closing {
    struct closing *next;
    int fd;
};

/* Sockets of one user that wait to be closed. The entry exists until none waits. */
struct user {
    struct user *next;
    uint64_t number;
    struct closing *first;
    bool served; /* a thread closes them */
};

static struct held *held;
static size_t held_count, held_room;

static pthread_mutex_t users_lock = PTHREAD_MUTEX_INITIALIZER;
static struct user *users; /* guarded by users_lock */
static bool holder_ended;  /* guarded by users_lock */

/*
 * Takes all sockets of the user. If there are none, removes the user and returns NULL. Sets *settled if the holder has
 * ended: no copy of it is left then.
 */
static struct closing *take_all(struct user *user, bool *settled)
{
    pthread_mutex_lock(&users_lock);
    struct closing *first = user->first;
    user->first = NULL;
    *settled = holder_ended;
    if (first == NULL) {
        struct user **link = &users;
        while (*link != user)
            link = &(*link)->next;
        *link = user->next;
        free(user);
    }
    pthread_mutex_unlock(&users_lock);
    return first;
}

static void *close_all(void *argument)
{
    const struct timespec settle = {.tv_sec = SETTLE_S};
    bool settled;
    for (struct closing *next, *item; (item = take_all(argument, &settled)) != NULL;) {
        if (!settled)
            nanosleep(&settle, NULL);
        for (; item != NULL; item = next) {
            next = item->next;
            close(item->fd); /* may never return */
            free(item);
        }
    }
    return NULL;
}

static struct user *user_of(uint64_t number)
{
    struct user *user = users;
    while (user != NULL && user->number != number)
        user = user->next;
    if (user == NULL && (user = calloc(1, sizeof(*user))) != NULL) {
        user->number = number;
        user->next = users;
        users = user;
    }
    return user;
}

static bool start_thread(struct user *user)
{
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK_BYTES);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    bool started = pthread_create(&thread, &small, close_all, user) == 0;
    pthread_attr_destroy(&small);
    return started;
}

static bool listens(int fd)
{
    int is = 0;
    socklen_t size = sizeof(is);
    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is, &size) == 0 && is;
}

/*
 * Drops the queued bytes of a socket, up to the first message with descriptors. The socket is shut down, so no more
 * bytes arrive. Returns true if there is such a message, or after an error.
 */
static bool has_descriptors(int fd)
{
    static char data[65536];
    int on = 1, type = 0;
    socklen_t type_size = sizeof(type);
    /*
     * room for credentials only: they distinguish an empty message from the end of the stream, and descriptors are cut
     * off (MSG_CTRUNC)
     */
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size) != 0)
        return true;
    for (;;) {
        struct iovec part = {.iov_base = data, .iov_len = sizeof(data)};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
        ssize_t size = recvmsg(fd, &message, MSG_PEEK | MSG_DONTWAIT);
        if (size < 0)
            return errno != EAGAIN;
        if (message.msg_flags & MSG_CTRUNC)
            return true;
        if (size == 0 && (type != SOCK_SEQPACKET || CMSG_FIRSTHDR(&message) == NULL))
            return false;
        if (recv(fd, data, (size_t)size, MSG_DONTWAIT) != size)
            return true;
    }
}

/*
 * Closes the socket on a thread. If no thread can be started, the socket stays open until the next socket of its user
 * is closed; without memory, until the keeper ends.
 */
static void close_later(int fd, uint64_t number)
{
    struct closing *item = malloc(sizeof(*item));
    pthread_mutex_lock(&users_lock);
    struct user *user = item == NULL ? NULL : user_of(number);
    if (user != NULL) {
        *item = (struct closing){.next = user->first, .fd = fd};
        user->first = item;
        user->served = user->served || start_thread(user);
    } else {
        free(item);
    }
    pthread_mutex_unlock(&users_lock);
}

/* Closes a socket that the holder has closed: at once if the close cannot wait for a caller, otherwise on a thread. */
static void let_go(int fd, uint64_t number)
{
    if (!listens(fd)) { /* a listener is not shut down: another process may use it, too */
        shutdown(fd, SHUT_RDWR);
        if (!has_descriptors(fd)) {
            close(fd);
            return;
        }
    }
    close_later(fd, number);
}

static void hold(const struct keeper_message *message, int fd)
{
    if (held_count == held_room) {
        size_t room = held_room == 0 ? 64 : 2 * held_room;
        struct held *grown = realloc(held, room * sizeof(*held));
        if (grown == NULL)
            return;
        held = grown;
        held_room = room;
    }
    held[held_count++] = (struct held){.message = *message, .fd = fd};
}

static void drop(uint64_t number)
{
    for (size_t i = 0; i < held_count; i++) {
        if (held[i].message.number != number)
            continue;
        let_go(held[i].fd, held[i].message.user);
        held[i] = held[--held_count];
        return;
    }
}

/* Reads one message. Returns false if the holder has closed the line, or after an error. */
static bool serve_one(void)
{
    struct keeper_message message;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = &message, .iov_len = sizeof(message)};
    struct msghdr header = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ssize_t size = recvmsg(KEEPER_LINE, &header, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR)
        return true;
    if (size != (ssize_t)sizeof(message))
        return false;
    const struct cmsghdr *item = CMSG_FIRSTHDR(&header);
    if (item != NULL && item->cmsg_type == SCM_RIGHTS) {
        int fd;
        memcpy(&fd, CMSG_DATA(item), sizeof(fd));
        hold(&message, fd);
    } else {
        drop(message.number);
    }
    return true;
}

/*
 * Called when the holder has ended, so that its copies of the sockets are closed. Shuts down the connections that the
 * keeper holds, so that the callers see their end, and closes them.
 */
static void drop_all(void)
{
    pthread_mutex_lock(&users_lock);
    holder_ended = true;
    pthread_mutex_unlock(&users_lock);
    while (held_count > 0)
        drop(held[held_count - 1].message.number);
}

/*
 * Called when the holder has closed its connection to this keeper, but still runs: the holder has another keeper by
 * then, which holds the holder's open sockets. So this keeper closes all of its copies.
 */
static void leave_all(void)
{
    while (held_count > 0) {
        held_count--;
        close_later(held[held_count].fd, held[held_count].message.user);
    }
}

int keeper_run(void)
{
    struct pollfd watched[] = {{.fd = KEEPER_LINE, .events = POLLIN}, {.fd = KEEPER_HOLDER, .events = POLLIN}};
    prctl(PR_SET_NAME, "vgpu-keeper");
    /* ignores the SIGTERM that systemd sends to all processes of a unit: the keeper must outlive its holder */
    signal(SIGTERM, SIG_IGN);
    while (watched[0].fd >= 0 || held_count > 0) {
        int ready = poll(watched, 2, watched[0].fd >= 0 ? -1 : SETTLE_S * 1000);
        if (ready < 0 && errno != EINTR)
            return EXIT_FAILURE;
        if (ready == 0) {
            leave_all();
        } else if (watched[0].fd >= 0 && watched[0].revents != 0) {
            if (!serve_one())
                watched[0].fd = -1;
        } else if (watched[1].revents != 0) {
            drop_all();
        }
    }
    pthread_exit(NULL); /* the process ends with its last thread */
}

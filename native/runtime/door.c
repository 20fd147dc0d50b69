#include "door.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { REPLY_MAX = 64 << 20, PAUSE_MS = 20 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int reach(const char *run_dir, int answer_s)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", run_dir, VGPU_DOOR_SOCKET);
    if (length < 0 || (size_t)length >= sizeof(address.sun_path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval patience = {.tv_sec = answer_s};
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static bool send_all(int fd, const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        bytes += sent;
        length -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int fd, char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t got = recv(fd, bytes, length, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0)
            errno = ECONNRESET;
        if (got <= 0)
            return false;
        bytes += got;
        length -= (size_t)got;
    }
    return true;
}

/* Sends the head of the request, and with it the pidfd if the call has one. */
static bool send_head(int fd, const struct vgpu_door_call *call, const struct vgpu_door_request *head)
{
    struct iovec part = {.iov_base = (void *)head, .iov_len = sizeof(*head)};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (call->pidfd >= 0) {
        message.msg_control = control.room;
        message.msg_controllen = sizeof(control.room);
        struct cmsghdr *item = CMSG_FIRSTHDR(&message);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(item), &call->pidfd, sizeof(int));
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(*head);
}

static int converse(int fd, const struct vgpu_door_call *call, char **reply, size_t *reply_length)
{
    struct vgpu_door_request head = {VGPU_DOOR_MAGIC, call->verb, call->flags, (uint32_t)strlen(call->id),
                                     (uint32_t)call->body_length};
    struct vgpu_door_reply answer;
    if (!send_head(fd, call, &head) || !send_all(fd, call->id, head.id_length) ||
        !send_all(fd, call->body, call->body_length) || !receive_all(fd, (char *)&answer, sizeof(answer)))
        return -1;
    if (answer.magic != VGPU_DOOR_MAGIC || answer.body_length > REPLY_MAX) {
        errno = EPROTO;
        return -1;
    }
    char *body = malloc((size_t)answer.body_length + 1);
    if (body == NULL || !receive_all(fd, body, answer.body_length)) {
        free(body);
        return -1;
    }
    body[answer.body_length] = '\0';
    *reply = body;
    *reply_length = answer.body_length;
    return (int)answer.status;
}

/* Can the error come from a vgpud that is being restarted? The request can be repeated safely, with the same reply. */
static bool may_pass(int error)
{
    return error == ENOENT || error == ECONNREFUSED || error == ECONNRESET || error == EPIPE || error == EAGAIN;
}

static int refuse_size(const struct vgpu_door_call *call, char **reply, size_t *reply_length)
{
    static const char text[] = "the container's %s has %zu bytes, and vgpud reads %d at most (E103)\n"
                               "hint: make its annotations, environment and mounts smaller";
    const char *what = call->verb == VGPU_DOOR_PREPARE ? "config.json" : "state";
    int length = asprintf(reply, text, what, call->body_length, (int)VGPU_DOOR_BODY_MAX);
    *reply_length = length < 0 ? 0 : (size_t)length;
    return length < 0 ? -1 : VGPU_DOOR_REFUSED;
}

int vgpu_door_call(const struct vgpu_door_call *call, char **reply, size_t *reply_length)
{
    if (call->body_length > VGPU_DOOR_BODY_MAX)
        return refuse_size(call, reply, reply_length);
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000L};
    double end = now_s() + call->patience_s;
    for (;;) {
        int fd = reach(call->run_dir, call->answer_s);
        int status = fd < 0 ? -1 : converse(fd, call, reply, reply_length);
        int error = errno;
        if (fd >= 0)
            close(fd);
        errno = error;
        if (status >= 0 || !may_pass(error) || now_s() > end)
            return status;
        nanosleep(&pause, NULL);
    }
}

/*
 * Does the text contain an escape that Go's encoder does not write? An escape can spell a letter, and so hide the name
 * of a variable or an annotation that requests a device.
 */
static bool hides_text(const char *config, size_t length)
{
    static const char *const usual[] = {"003c", "003e", "0026", "2028", "2029"};
    const char *end = config + length;
    for (const char *at = config; (at = memmem(at, (size_t)(end - at), "\\u", 2)) != NULL; at += 2) {
        bool known = false;
        for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]) && end - at >= 6; i++)
            known |= memcmp(at + 2, usual[i], 4) == 0;
        if (!known)
            return true;
    }
    return false;
}

/* Is the prefix of vgpud's annotations in the text, in small letters or capitals? */
static bool names_annotation(const char *config, size_t length)
{
    static const char prefix[] = "vgpud.io";
    const char *end = config + length;
    for (const char *at = config; (at = memmem(at, (size_t)(end - at), ".", 1)) != NULL; at++)
        if (at - config >= 5 && end - at >= 3 && strncasecmp(at - 5, prefix, sizeof(prefix) - 1) == 0)
            return true;
    return false;
}

bool vgpu_may_ask(const char *config, size_t length)
{
    static const char *const marks[] = {"VGPU_", "NVIDIA_GPU_MEMORY_"};
    for (size_t i = 0; i < sizeof(marks) / sizeof(marks[0]); i++)
        if (memmem(config, length, marks[i], strlen(marks[i])) != NULL)
            return true;
    return names_annotation(config, length) || hides_text(config, length);
}

#include "control.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "serve.h"

static void control_destroy(struct source *source)
{
    free(source);
}

static void send_reply(struct source *source, const void *reply, size_t size)
{
    if (send(source->fd, reply, size, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)size)
        loop_remove(source);
}

static void send_result(struct source *source, int error)
{
    struct vgpu_message reply = {.kind = error == 0 ? VGPU_MSG_OK : VGPU_MSG_ERROR,
                                 .version = VGPU_LEASE_VERSION,
                                 .slot = VGPU_NO_SLOT,
                                 .value = -error,
                                 .turn.flags = VGPU_LIST_LINKS};
    send_reply(source, &reply, sizeof(reply));
}

static void send_list(struct source *source, const char *id)
{
    struct vgpu_process_list list;
    memset(&list, 0, sizeof(list));
    list.head.kind = VGPU_MSG_PROCESSES;
    list.head.version = VGPU_LEASE_VERSION;
    int error = lease_list(id, &list);
    list.head.turn.flags |= VGPU_LIST_LINKS;
    if (error != 0)
        send_result(source, error);
    else
        send_reply(source, &list, sizeof(list));
}

static void handle(struct source *source, const struct vgpu_message *request)
{
    if (request->version != VGPU_LEASE_VERSION)
        send_result(source, -EPROTO);
    else if (!lease_id_valid(request->allocation))
        send_result(source, -EINVAL);
    else if (request->kind == VGPU_MSG_ADD)
        send_result(source, lease_add(request->allocation));
    else if (request->kind == VGPU_MSG_REMOVE)
        send_result(source, lease_remove(request->allocation));
    else if (request->kind == VGPU_MSG_LOOK)
        send_result(source, lease_look(request->allocation));
    else if (request->kind == VGPU_MSG_LIST)
        send_list(source, request->allocation);
    else
        send_result(source, -EINVAL);
}

static void control_ready(struct source *source, uint32_t events)
{
    struct vgpu_message request;
    ssize_t size = recv(source->fd, &request, sizeof(request), MSG_TRUNC);
    if (size == (ssize_t)sizeof(request))
        handle(source, &request);
    else if (size >= 0 || (errno != EAGAIN && errno != EINTR) || (events & (EPOLLHUP | EPOLLERR)))
        loop_remove(source);
}

static void control_accept(struct source *listener, uint32_t events)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);
    (void)events;
    int fd = loop_accept(listener->fd);
    if (fd < 0)
        return;
    struct source *source = NULL;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == 0 || peer.uid == geteuid()))
        source = calloc(1, sizeof(*source));
    if (source != NULL) {
        *source = (struct source){.fd = fd, .ready = control_ready, .destroy = control_destroy};
        if (loop_add(source, EPOLLIN) == 0)
            return;
    }
    free(source);
    close(fd);
}

int control_open(const char *path)
{
    static struct source listener = {.ready = control_accept};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, strlen(path) + 1);
    listener.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener.fd < 0)
        return -errno;
    unlink(path);
    if (bind(listener.fd, (struct sockaddr *)&address, sizeof(address)) != 0 || chmod(path, 0600) != 0 ||
        listen(listener.fd, SOMAXCONN) != 0)
        return -errno;
    return loop_add(&listener, EPOLLIN);
}

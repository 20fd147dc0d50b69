#include "register.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "identity.h"
#include "invariant.h"
#include "leases.h"
#include "usage_io.h"
#include "process.h"
#include "rest.h"
#include "turns.h"
#include "untrusted.h"

/* maximum of connections for one lease; forked children may keep old connections open */
#define CONNECTIONS_MAX (2 * VGPU_MAX_SLOTS)

void connection_close(struct connection *connection)
{
    turns_leave(connection);
    struct connection **link = &connection->lease->connections;
    while (*link != NULL && *link != connection)
        link = &(*link)->next;
    if (*link != NULL)
        *link = connection->next;
    VGPU_ASSERT(connection->lease->connection_count > 0);
    connection->lease->connection_count--;
    loop_remove(&connection->socket);
    if (connection->pidfd >= 0)
        close(connection->pidfd);
    connection->pidfd = -1;
    if (connection->owner != 0)
        process_left(connection->lease, connection->owner);
    lease_release(connection->lease);
}

static void connection_destroy(struct source *source)
{
    free(source); /* the source is the first member of the object, so this frees the object */
}

static bool lease_closed(const struct lease *lease)
{
    uint32_t state = 0;
    off_t at = (off_t)offsetof(struct vgpu_limits, state);
    return pread(lease->limits_fd, &state, sizeof(state), at) == (ssize_t)sizeof(state) && state == VGPU_LEASE_CLOSED;
}

/*
 * Forgets former processes of a slot that another process holds now. (The former process has ended, called exec or
 * closed its files.)
 */
static void forget_former(struct lease *lease, const struct process *now)
{
    for (struct process *p = lease->processes, *next; p != NULL; p = next) {
        next = p->next;
        if (p->slot == now->slot && p != now)
            process_forget(p);
    }
}

static struct vgpu_message answer(struct connection *connection, const struct vgpu_message *request)
{
    struct lease *lease = connection->lease;
    struct vgpu_message reply = {.kind = VGPU_MSG_REFUSED, .version = VGPU_LEASE_VERSION, .slot = request->slot};
    int error = 0;
    if (request->kind != VGPU_MSG_REGISTER || request->slot >= VGPU_MAX_SLOTS) {
        reply.value = EINVAL;
    } else if (request->version != VGPU_LEASE_VERSION) {
        reply.value = EPROTO;
    } else if (connection->pidfd < 0) {
        reply.value = EALREADY;
    } else if (lease_closed(lease)) {
        reply.value = ESHUTDOWN;
    } else {
        struct process *process = process_watch(lease, request->slot, connection->pid, connection->pidfd, &error);
        reply.value = error;
        if (process != NULL) {
            forget_former(lease, process);
            process_moved(process);
            reply.kind = VGPU_MSG_WELCOME;
            reply.owner = process->owner;
            connection->owner = process->owner;
            close(connection->pidfd); /* from now on the pidfd of the process record watches the process */
            connection->pidfd = -1;
            reply.value = process->pid;
        }
    }
    return reply;
}

static void connection_ready(struct source *source, uint32_t events)
{
    struct connection *connection = (struct connection *)source;
    struct lease *lease = connection->lease;
    struct vgpu_message request;
    ssize_t size = untrusted_recv(source->fd, &request, sizeof(request));
    if (size < 0 && (errno == EAGAIN || errno == EINTR) && !(events & (EPOLLHUP | EPOLLERR)))
        return;
    if (size != (ssize_t)sizeof(request) || !rest_afford(lease, 1)) {
        connection_close(connection);
        return;
    }
    if (request.kind == VGPU_MSG_WANT || request.kind == VGPU_MSG_DONE || request.kind == VGPU_MSG_ENDING ||
        request.kind == VGPU_MSG_CHANNELS) {
        if (request.version != VGPU_LEASE_VERSION || !turns_message(connection, &request))
            connection_close(connection);
        return;
    }
    struct vgpu_message reply = answer(connection, &request);
    if (send(source->fd, &reply, sizeof(reply), MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof(reply)) {
        connection_close(connection);
    } else if (reply.kind == VGPU_MSG_WELCOME) {
        if (loop_hasten(source, EPOLLIN) != 0) {
            connection_close(connection);
            return;
        }
        connection->slot = request.slot;
        turns_lease_add(lease); /* tries again: the lease's limits may have been unreadable when it was added */
        turns_join(connection);
    }
}

void register_accept(struct source *source, uint32_t events)
{
    struct lease *lease = (struct lease *)source;
    (void)events;
    if (lease->resting) /* the lease may have begun to rest after epoll reported this event */
        return;
    int fd = loop_accept(source->fd);
    if (fd < 0)
        return;
    untrusted_hold(source->fd, UINT64_MAX);
    untrusted_hold(fd, lease_tenant(lease));
    pid_t pid = 0;
    bool room = rest_afford(lease, RATE_CONNECTION_UNITS) && lease->connection_count < CONNECTIONS_MAX;
    int pidfd = room ? identity_of_peer(fd, lease, &pid) : -1;
    struct connection *connection = pidfd >= 0 ? calloc(1, sizeof(*connection)) : NULL;
    if (connection == NULL || !lease_hold(lease)) {
        free(connection);
        untrusted_close(fd);
        if (pidfd >= 0)
            close(pidfd);
        return;
    }
    connection->pid = pid;
    connection->pidfd = pidfd;
    connection->socket = (struct source){
        .fd = fd, .slow = true, .ready = connection_ready, .destroy = connection_destroy};
    connection->lease = lease;
    if (loop_add(&connection->socket, EPOLLIN) != 0) {
        untrusted_close(fd);
        close(pidfd);
        free(connection);
        lease_release(lease);
        return;
    }
    connection->next = lease->connections;
    lease->connections = connection;
    lease->connection_count++;
}

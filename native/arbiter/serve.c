#include "serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "aside.h"
#include "cut.h"
#include "leases.h"
#include "looks.h"
#include "usage_guard.h"
#include "process.h"
#include "register.h"
#include "rest.h"
#include "turns.h"
#include "untrusted.h"

bool lease_id_valid(const char id[VGPU_ID_BYTES])
{
    size_t length = strnlen(id, VGPU_ID_BYTES);
    if (length == 0 || length == VGPU_ID_BYTES || id[0] == '.')
        return false;
    return strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

/* What another thread needs to bind a lease's socket. That thread closes both descriptors, which are copies. */
struct binding {
    int folder_fd;
    int socket_fd;
    mode_t mode;
    uid_t owner;
    gid_t group;
    int error; /* 0 or -errno */
};

/*
 * Binds the socket under a temporary name and renames it, so that a socket under the final name accepts connections at
 * once.
 */
static void bind_socket(void *data)
{
    struct binding *binding = data;
    int folder_fd = binding->folder_fd;
    static const char temporary[] = ".arbiter.sock.new";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /*
     * The path goes through the folder's descriptor: the lease's path may be longer than sun_path, and a descriptor
     * cannot be replaced by another folder.
     */
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", folder_fd, temporary);
    unlinkat(folder_fd, temporary, 0);
    bool bound = bind(binding->socket_fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                 fchmodat(folder_fd, temporary, binding->mode, 0) == 0 &&
                 fchownat(folder_fd, temporary, binding->owner, binding->group, AT_SYMLINK_NOFOLLOW) == 0 &&
                 listen(binding->socket_fd, SOMAXCONN) == 0 &&
                 renameat(folder_fd, temporary, folder_fd, VGPU_ARBITER_SOCKET) == 0;
    binding->error = bound ? 0 : -errno;
    if (!bound)
        unlinkat(folder_fd, temporary, 0);
    close(folder_fd);
    close(binding->socket_fd);
}

/*
 * Binds the lease's socket on another thread: a container's root may list the folder, and a tenant that lists it can
 * keep the folder's lock in the kernel. A user that may write `usage` may connect. Returns 0, also if the binding goes
 * on or must be tried again; -errno if the file system refuses it.
 */
static int bind_aside(struct lease *lease, int folder_fd)
{
    struct stat usage;
    uint64_t took_ns;
    if (fstatat(folder_fd, VGPU_USAGE_FILE, &usage, AT_SYMLINK_NOFOLLOW) != 0)
        return -errno;
    struct binding binding = {.folder_fd = fcntl(folder_fd, F_DUPFD_CLOEXEC, 0),
                              .socket_fd = fcntl(lease->unbound_fd, F_DUPFD_CLOEXEC, 0),
                              .mode = lease->anyone ? 0666 : 0600,
                              .owner = lease->owner,
                              .group = usage.st_gid};
    enum aside done = binding.folder_fd < 0 || binding.socket_fd < 0
                          ? ASIDE_NOT_BEGUN
                          : aside(lease_tenant(lease), bind_socket, &binding, sizeof(binding), &took_ns);
    lease->binds = done == ASIDE_GOES_ON;
    if (done == ASIDE_NOT_BEGUN) {
        close(binding.folder_fd);
        close(binding.socket_fd);
    }
    return done == ASIDE_DONE ? binding.error : 0;
}

static bool accepts(int socket_fd)
{
    int listens = 0;
    socklen_t size = sizeof(listens);
    return getsockopt(socket_fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens;
}

bool lease_listen(struct lease *lease)
{
    int folder_fd;
    if (lease->unbound_fd < 0)
        return true;
    if (!accepts(lease->unbound_fd) && !lease->binds && (folder_fd = lease_open_folder(lease->id)) >= 0) {
        (void)bind_aside(lease, folder_fd);
        close(folder_fd);
    }
    if (!accepts(lease->unbound_fd))
        return false;
    lease->listener.fd = lease->unbound_fd;
    if (!lease->resting && loop_add(&lease->listener, EPOLLIN) != 0) {
        lease->listener.fd = -1;
        return false;
    }
    lease->unbound_fd = -1;
    return true;
}

static void lease_destroy(struct source *source)
{
    free(source); /* the source is the first member of the object, so this frees the object */
}

static void lease_close(struct lease *lease)
{
    while (lease->processes != NULL)
        process_forget(lease->processes);
    while (lease->connections != NULL)
        connection_close(lease->connections);
    turns_lease_remove(lease);
    usage_guard_end(lease->watch);
    if (lease->holds > 0)
        lease_close_files(lease);
    rest_forget(lease);
    looks_forget(lease);
    lease_unlink(lease);
    if (lease->unbound_fd >= 0)
        untrusted_close(lease->unbound_fd);
    loop_remove(&lease->listener);
}

/* Opens the lease's files and socket, and holds the lease. If a step fails, everything is closed again. */
static int lease_open(int folder_fd, struct lease *lease)
{
    struct stat usage;
    int error = lease_open_files(folder_fd, lease, &usage);
    if (error != 0)
        return error;
    lease->holds = 1;
    lease->usage_device = usage.st_dev;
    lease->usage_inode = usage.st_ino;
    lease->owner = usage.st_uid;
    lease->anyone = (usage.st_mode & S_IWOTH) != 0;
    lease->listener.fd = -1;
    lease->unbound_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    error = lease->unbound_fd < 0 ? -errno : 0;
    if (error == 0) {
        untrusted_listen(lease->unbound_fd);
        untrusted_hold(lease->unbound_fd, UINT64_MAX); /* before a tenant can connect */
        error = bind_aside(lease, folder_fd);
    }
    if (error != 0) {
        if (lease->unbound_fd >= 0)
            untrusted_close(lease->unbound_fd);
        lease_close_files(lease);
    }
    return error;
}

/* Is `usage` still the inode that it was when the lease was added? If not, the lease's folder was replaced. */
static bool same_folder(int folder_fd, const struct lease *lease)
{
    struct stat now;
    return fstatat(folder_fd, VGPU_USAGE_FILE, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_ino == lease->usage_inode &&
           now.st_dev == lease->usage_device;
}

/*
 * Handles a move of the lease to other devices: its slices and requests are for the old devices, so the connections are
 * closed, and the lease's processes must connect again. The process records stay.
 */
static void follow(struct lease *lease)
{
    while (lease->connections != NULL)
        connection_close(lease->connections);
    turns_lease_follow(lease);
}

static int lease_add_folder(int folder_fd, const char *id)
{
    struct lease *lease = lease_find(id);
    if (lease != NULL && same_folder(folder_fd, lease)) {
        if (lease_hold(lease)) {
            if (turns_lease_moved(lease))
                follow(lease);
            else
                turns_lease_refresh(lease);
            lease_release(lease);
        }
        return 0;
    }
    if (lease != NULL)
        lease_close(lease);
    lease = calloc(1, sizeof(*lease));
    if (lease == NULL)
        return -ENOMEM;
    lease->listener.slow = true;
    lease->listener.ready = register_accept;
    lease->listener.destroy = lease_destroy;
    memcpy(lease->id, id, strlen(id) + 1);
    int error = lease_open(folder_fd, lease);
    if (error != 0) {
        free(lease);
        return error;
    }
    usage_guard_begin(lease);
    lease_link(lease);
    turns_lease_add(lease);
    if (!lease_listen(lease))
        rest_look_later(lease);
    process_sweep(lease);
    process_adopt_all(lease);
    lease_release(lease);
    return 0;
}

int lease_add(const char *id)
{
    int folder_fd = lease_open_folder(id);
    if (folder_fd < 0)
        return folder_fd;
    int error = lease_add_folder(folder_fd, id);
    close(folder_fd);
    return error;
}

int lease_remove(const char *id)
{
    struct lease *lease = lease_find(id);
    if (lease == NULL)
        return -ENOENT;
    lease_close(lease);
    return 0;
}

int lease_look(const char *id)
{
    struct lease *lease = lease_find(id);
    if (lease == NULL)
        return -ENOENT;
    turns_lease_refresh(lease);
    for (struct connection *c = lease->connections; c != NULL; c = c->next)
        turns_look(c);
    return 0;
}

int lease_list(const char *id, struct vgpu_process_list *list)
{
    struct lease *lease = lease_find(id);
    if (lease == NULL)
        return -ENOENT;
    uint32_t count = 0;
    for (struct process *p = lease->processes; p != NULL && count < VGPU_MAX_SLOTS; p = p->next)
        if (p->due != PROCESS_ENDED && p->later != PROCESS_ENDED)
            list->pids[count++] = p->pid;
    list->head.value = count;
    list->head.slot = lease->cuts;
    list->head.owner = lease->shut;
    uint32_t flags = (lease->refused ? VGPU_LIST_REFUSED : 0) | (cut_paused(lease) ? VGPU_LIST_PAUSED : 0);
    list->head.turn = (struct vgpu_turn){
        .flags = flags, .number = lease->refused_status, .length_ns = (uint64_t)lease->refused_errno};
    return 0;
}

int lease_scan(int leases_fd)
{
    leases_open(leases_fd);
    int failed = 0;
    int copy = openat(leases_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = copy < 0 ? NULL : fdopendir(copy);
    if (folder == NULL)
        return 1;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char id[VGPU_ID_BYTES] = {0};
        if (strlen(entry->d_name) >= sizeof(id))
            continue;
        memcpy(id, entry->d_name, strlen(entry->d_name));
        if (!lease_id_valid(id))
            continue;
        int error = lease_add(id);
        if (error != 0) {
            fprintf(stderr, "vgpu-arbiter: cannot serve lease %s: %s\n", id, strerror(-error));
            failed++;
        }
    }
    closedir(folder);
    return failed;
}

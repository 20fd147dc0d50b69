#include "served.h"

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

#include "bound.h"
#include "page.h"
#include "process.h"
#include "register.h"
#include "turns.h"

static struct lease *leases;

bool lease_id_valid(const char id[VGPU_ID_BYTES])
{
    size_t length = strnlen(id, VGPU_ID_BYTES);
    if (length == 0 || length == VGPU_ID_BYTES || id[0] == '.')
        return false;
    return strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

static struct lease *lease_find(const char *id)
{
    for (struct lease *lease = leases; lease != NULL; lease = lease->next)
        if (strcmp(lease->id, id) == 0)
            return lease;
    return NULL;
}

/* A regular file of at least `size` bytes, opened without following a link or blocking on a fifo. */
static int open_regular(int folder_fd, const char *name, int flags, size_t size)
{
    struct stat about;
    int fd = openat(folder_fd, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size < (off_t)size) {
        close(fd);
        return -EINVAL;
    }
    return fd;
}

/* Binds under a temporary name and renames it into place: tenants never see a socket that refuses. */
static int bind_socket(int folder_fd, int usage_fd)
{
    static const char temporary[] = ".arbiter.sock.new";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat owner;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    /* through the held folder: a lease path may be longer than sun_path, and cannot be swapped */
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", folder_fd, temporary);
    unlinkat(folder_fd, temporary, 0);
    if (fstat(usage_fd, &owner) == 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
        fchmodat(folder_fd, temporary, 0600, 0) == 0 &&
        fchownat(folder_fd, temporary, owner.st_uid, owner.st_gid, AT_SYMLINK_NOFOLLOW) == 0 &&
        listen(fd, SOMAXCONN) == 0 && renameat(folder_fd, temporary, folder_fd, VGPU_ARBITER_SOCKET) == 0)
        return fd;
    int error = errno;
    close(fd);
    unlinkat(folder_fd, temporary, 0);
    return -error;
}

static void lease_destroy(struct source *source)
{
    struct lease *lease = (struct lease *)source;
    close(lease->limits_fd);
    close(lease->usage_fd);
    free(lease);
}

static void lease_close(struct lease *lease)
{
    while (lease->processes != NULL)
        process_forget(lease->processes);
    while (lease->connections != NULL)
        connection_close(lease->connections);
    turns_lease_remove(lease);
    bound_end(lease->watch);
    struct lease **link = &leases;
    while (*link != lease)
        link = &(*link)->next;
    *link = lease->next;
    loop_remove(&lease->listener);
}

/* Opens the lease's files and socket; on failure everything is closed again. */
static int lease_open(int folder_fd, struct lease *lease)
{
    lease->limits_fd = open_regular(folder_fd, VGPU_LIMITS_FILE, O_RDONLY, sizeof(struct vgpu_limits));
    if (lease->limits_fd < 0)
        return lease->limits_fd;
    lease->usage_fd = open_regular(folder_fd, VGPU_USAGE_FILE, O_RDWR, 0);
    if (lease->usage_fd < 0) {
        close(lease->limits_fd);
        return lease->usage_fd;
    }
    lease->listener.fd = bind_socket(folder_fd, lease->usage_fd);
    int error = lease->listener.fd < 0 ? lease->listener.fd : loop_add(&lease->listener, EPOLLIN);
    if (error != 0) {
        if (lease->listener.fd >= 0)
            close(lease->listener.fd);
        close(lease->limits_fd);
        close(lease->usage_fd);
    }
    return error;
}

/* The same `usage` inode as when the lease was added: its folder was not replaced meanwhile. */
static bool same_folder(int folder_fd, const struct lease *lease)
{
    struct stat now;
    struct stat held;
    return fstatat(folder_fd, VGPU_USAGE_FILE, &now, AT_SYMLINK_NOFOLLOW) == 0 &&
           fstat(lease->usage_fd, &held) == 0 && now.st_ino == held.st_ino && now.st_dev == held.st_dev;
}

static int lease_add_folder(int folder_fd, const char *id)
{
    struct lease *lease = lease_find(id);
    if (lease != NULL && same_folder(folder_fd, lease)) {
        turns_lease_refresh(lease);
        return 0;
    }
    if (lease != NULL)
        lease_close(lease);
    lease = calloc(1, sizeof(*lease));
    if (lease == NULL)
        return -ENOMEM;
    lease->listener.ready = register_accept;
    lease->listener.destroy = lease_destroy;
    memcpy(lease->id, id, strlen(id) + 1);
    int error = lease_open(folder_fd, lease);
    if (error != 0) {
        free(lease);
        return error;
    }
    lease->watch = bound_begin(lease->usage_fd);
    lease->next = leases;
    leases = lease;
    turns_lease_add(lease);
    page_sweep(lease->usage_fd);
    process_adopt_all(lease);
    return 0;
}

int lease_add(int leases_fd, const char *id)
{
    int folder_fd = openat(leases_fd, id, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder_fd < 0)
        return -errno;
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

int lease_usage_by_watch(int watch)
{
    for (struct lease *lease = leases; lease != NULL; lease = lease->next)
        if (lease->watch == watch)
            return lease->usage_fd;
    return -1;
}

int lease_list(const char *id, struct vgpu_process_list *list)
{
    struct lease *lease = lease_find(id);
    if (lease == NULL)
        return -ENOENT;
    uint32_t count = 0;
    for (struct process *p = lease->processes; p != NULL && count < VGPU_MAX_SLOTS; p = p->next)
        list->pids[count++] = p->pid;
    list->head.value = count;
    return 0;
}

int lease_scan(int leases_fd)
{
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
        int error = lease_add(leases_fd, id);
        if (error != 0) {
            fprintf(stderr, "vgpu-arbiter: cannot serve lease %s: %s\n", id, strerror(-error));
            failed++;
        }
    }
    closedir(folder);
    return failed;
}

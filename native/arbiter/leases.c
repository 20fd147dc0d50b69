#include "leases.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "aside.h"
#include "invariant.h"
#include "rest.h"
#include "turns.h"
#include "usage_io.h"

static struct lease *leases;
static int leases_folder = -1;

void leases_open(int leases_fd)
{
    leases_folder = leases_fd;
}

void lease_link(struct lease *lease)
{
    lease->next = leases;
    leases = lease;
}

void lease_unlink(struct lease *lease)
{
    struct lease **link = &leases;
    while (*link != lease)
        link = &(*link)->next;
    *link = lease->next;
}

struct lease *lease_find(const char *id)
{
    for (struct lease *lease = leases; lease != NULL; lease = lease->next)
        if (strcmp(lease->id, id) == 0)
            return lease;
    return NULL;
}

struct lease *lease_by_watch(int watch)
{
    for (struct lease *lease = leases; lease != NULL; lease = lease->next)
        if (watch >= 0 && lease->watch == watch)
            return lease;
    return NULL;
}

void lease_each(void (*visit)(struct lease *lease))
{
    for (struct lease *lease = leases; lease != NULL; lease = lease->next)
        visit(lease);
}

/* Opens a regular file of at least `size` bytes, without following a link or blocking on a FIFO. */
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

struct files {
    int limits_fd;
    int usage_fd;
    unsigned char *usage_map;
};

static void close_all(void *data)
{
    const struct files *files = data;
    usage_io_unmap(files->usage_map);
    close(files->limits_fd);
    close(files->usage_fd);
}

uint64_t lease_close_files(struct lease *lease)
{
    uint64_t took_ns;
    struct files files = {lease->limits_fd, lease->usage_fd, lease->usage_map};
    if (aside(lease_tenant(lease), close_all, &files, sizeof(files), &took_ns) == ASIDE_NOT_BEGUN)
        close_all(&files);
    lease->limits_fd = -1;
    lease->usage_fd = -1;
    lease->usage_map = NULL;
    return took_ns;
}

int lease_open_files(int folder_fd, struct lease *lease, struct stat *usage)
{
    lease->limits_fd = open_regular(folder_fd, VGPU_LIMITS_FILE, O_RDONLY, VGPU_LIMITS_BYTES_LEAST);
    if (lease->limits_fd < 0)
        return lease->limits_fd;
    lease->usage_fd = open_regular(folder_fd, VGPU_USAGE_FILE, O_RDWR, 0);
    int error = lease->usage_fd < 0 ? lease->usage_fd : fstat(lease->usage_fd, usage) != 0 ? -errno : 0;
    if (error != 0) {
        close(lease->limits_fd);
        if (lease->usage_fd >= 0)
            close(lease->usage_fd);
        lease->limits_fd = -1;
        return error;
    }
    lease->usage_map = usage_io_map(lease->usage_fd);
    return 0;
}

static int open_below(int folder_fd, const char *name, int flags)
{
    int fd = openat(folder_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
    return fd < 0 ? -errno : fd;
}

int lease_open_folder(const char *id)
{
    struct stat about;
    int fd = open_below(leases_folder, id, 0); /* vgpud makes links here, to the file systems of users */
    if (fd < 0)
        return fd;
    int error = fstat(fd, &about) == 0 ? 0 : -errno;
    if (error == 0 && (about.st_mode & 0077) != 0)
        return fd;
    int inner = error != 0 ? error : open_below(fd, VGPU_ANYONE_FOLDER, O_NOFOLLOW);
    close(fd);
    return inner;
}

static bool is_usage_of(const struct lease *lease, const struct stat *usage)
{
    return usage->st_dev == lease->usage_device && usage->st_ino == lease->usage_inode;
}

int lease_open_to_read(const struct lease *lease)
{
    struct stat usage;
    int folder_fd = lease_open_folder(lease->id);
    if (folder_fd < 0)
        return folder_fd;
    int fd = open_regular(folder_fd, VGPU_USAGE_FILE, O_RDONLY, 0);
    close(folder_fd);
    if (fd < 0 || (fstat(fd, &usage) == 0 && is_usage_of(lease, &usage)))
        return fd;
    close(fd);
    return -ESTALE;
}

int lease_open_path(const struct lease *lease)
{
    struct stat usage;
    int folder_fd = lease_open_folder(lease->id);
    if (folder_fd < 0)
        return folder_fd;
    int fd = openat(folder_fd, VGPU_USAGE_FILE, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    int error = fd < 0 ? -errno : 0;
    close(folder_fd);
    if (fd < 0)
        return error;
    if (fstat(fd, &usage) == 0 && S_ISREG(usage.st_mode) && is_usage_of(lease, &usage))
        return fd;
    close(fd);
    return -ESTALE;
}

bool lease_hold(struct lease *lease)
{
    struct stat usage;
    if (lease->holds > 0) {
        lease->holds++;
        return true;
    }
    int folder_fd = lease_open_folder(lease->id);
    if (folder_fd < 0)
        return false;
    bool opened = lease_open_files(folder_fd, lease, &usage) == 0;
    close(folder_fd);
    if (opened && !is_usage_of(lease, &usage)) {
        lease_close_files(lease);
        opened = false;
    }
    lease->holds = opened ? 1 : 0;
    return opened;
}

void lease_release(struct lease *lease)
{
    VGPU_ASSERT(lease->holds > 0);
    if (--lease->holds > 0)
        return;
    turns_lease_settle(lease);
    if (lease->shut)
        lease->holds = 1; /* the files stay open, because opening and closing them each time would cost more */
    else
        rest_spent_on_look(lease, lease_close_files(lease));
}

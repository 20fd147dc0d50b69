#include "lease_open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "descriptor.h"
#include "lease_limits.h"
#include "standalone.h"

/*
 * Sets view->folder. Returns 1 if there is a lease, 0 if there is none, -errno if the lease's path is invalid or cannot
 * be found out.
 */
static int find_folder(struct vgpu_lease_view *view, bool computes)
{
    struct stat about;
    if (lstat(VGPU_LEASE_MOUNT, &about) == 0) {
        memcpy(view->folder, VGPU_LEASE_MOUNT, sizeof(VGPU_LEASE_MOUNT));
        return 1;
    }
    if (errno != ENOENT && errno != ENOTDIR)
        return -errno;
    const char *path = getenv(VGPU_LEASE_ENV);
    if (path == NULL || path[0] == '\0')
        return vgpu_standalone_lease(view, computes);
    size_t length = strlen(path);
    if (path[0] != '/' || length >= sizeof(view->folder) - sizeof(VGPU_ARBITER_SOCKET) - 1)
        return -EINVAL;
    memcpy(view->folder, path, length + 1);
    return 1;
}

#define FILE_PATH_MAX (VGPU_LEASE_PATH_MAX + sizeof(VGPU_LIMITS_FILE) + 1)

static bool path_of(char path[FILE_PATH_MAX], const char *folder, const char *name)
{
    return snprintf(path, FILE_PATH_MAX, "%s/%s", folder, name) < (int)FILE_PATH_MAX;
}

int vgpu_lease_file(const char *folder, const char *name, int flags)
{
    char path[FILE_PATH_MAX];
    if (!path_of(path, folder, name))
        return -ENAMETOOLONG;
    int fd = open(path, flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == EROFS)
        fd = open(VGPU_USAGE_MOUNT, flags | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? -errno : vgpu_above_stdio(fd);
}

void vgpu_lease_close(const char *folder, const char *name, int fd)
{
    char path[FILE_PATH_MAX];
    struct stat there;
    struct stat here;
    if (path_of(path, folder, name) && lstat(path, &there) == 0 && fstat(fd, &here) == 0 &&
        there.st_dev == here.st_dev && there.st_ino == here.st_ino)
        close(fd);
}

/*
 * Maps `size` bytes of a file. An access beyond the file's last page would raise SIGBUS in the program, so a file of
 * less than `least` bytes is refused. Bytes that are missing in the last page read as zeros.
 */
static int map_file(int fd, size_t least, size_t size, int protection, void **mapped)
{
    struct stat about;
    if (fstat(fd, &about) != 0)
        return -errno;
    if (!S_ISREG(about.st_mode) || about.st_size < (off_t)least)
        return -EINVAL;
    *mapped = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    return *mapped == MAP_FAILED ? -errno : 0;
}

static int open_limits(struct vgpu_lease_view *view)
{
    void *mapped = NULL;
    int fd = vgpu_lease_file(view->folder, VGPU_LIMITS_FILE, O_RDONLY);
    if (fd < 0)
        return fd;
    int error = map_file(fd, VGPU_LIMITS_BYTES_LEAST, sizeof(struct vgpu_limits), PROT_READ, &mapped);
    vgpu_lease_close(view->folder, VGPU_LIMITS_FILE, fd);
    if (error != 0)
        return error;
    view->limits = mapped;
    error = vgpu_limits_read(view->limits, &view->first);
    if (error != 0)
        munmap(mapped, sizeof(struct vgpu_limits));
    return error;
}

static int open_usage(struct vgpu_lease_view *view)
{
    void *mapped = NULL;
    int fd = vgpu_lease_file(view->folder, VGPU_USAGE_FILE, O_RDWR);
    if (fd < 0)
        return fd;
    int error = map_file(fd, sizeof(struct vgpu_usage), sizeof(struct vgpu_usage), PROT_READ | PROT_WRITE, &mapped);
    if (error != 0) {
        vgpu_lease_close(view->folder, VGPU_USAGE_FILE, fd);
        return error;
    }
    view->usage = mapped;
    view->usage_fd = fd;
    return 0;
}

int vgpu_lease_open(struct vgpu_lease_view *view, bool computes)
{
    view->wrong[0] = '\0';
    view->limits = NULL;
    view->usage = NULL;
    view->usage_fd = -1;
    int found = find_folder(view, computes);
    if (found != 1)
        return found;
    int error = open_limits(view);
    if (error != 0)
        return error;
    error = open_usage(view);
    if (error != 0 && computes) {
        munmap((void *)view->limits, sizeof(struct vgpu_limits));
        return error;
    }
    return 1;
}

const struct vgpu_limits *vgpu_lease_limits(const char *folder)
{
    void *mapped = NULL;
    int fd = vgpu_lease_file(folder, VGPU_LIMITS_FILE, O_RDONLY);
    bool done = fd >= 0 && map_file(fd, VGPU_LIMITS_BYTES_LEAST, sizeof(struct vgpu_limits), PROT_READ, &mapped) == 0;
    if (fd >= 0)
        vgpu_lease_close(folder, VGPU_LIMITS_FILE, fd);
    return done ? mapped : NULL;
}

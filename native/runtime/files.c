#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_MAX_BYTES = 64 << 20, STEP = 64 << 10 };

char *vgpu_read_fd(int fd, size_t *length)
{
    char *bytes = NULL;
    size_t have = 0, room = 0;
    for (;;) {
        if (room - have < STEP) {
            room = room * 2 + 2 * STEP;
            char *more = room > FILE_MAX_BYTES ? NULL : realloc(bytes, room);
            if (more == NULL) {
                errno = EFBIG;
                break;
            }
            bytes = more;
        }
        ssize_t got = read(fd, bytes + have, room - have - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            break;
        if (got == 0) {
            bytes[have] = '\0';
            *length = have;
            return bytes;
        }
        have += (size_t)got;
    }
    free(bytes);
    return NULL;
}

char *vgpu_read_file(const char *path, size_t *length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    char *bytes = vgpu_read_fd(fd, length);
    int error = errno;
    close(fd);
    errno = error;
    return bytes;
}

static int write_all(int fd, const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t put = write(fd, bytes, length);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        bytes += put;
        length -= (size_t)put;
    }
    return 0;
}

int vgpu_replace_file(const char *path, const char *bytes, size_t length)
{
    char draft[PATH_MAX];
    struct stat before = {.st_mode = 0600, .st_uid = geteuid(), .st_gid = getegid()};
    int named = snprintf(draft, sizeof(draft), "%s.vgpud-new", path);
    if (named < 0 || (size_t)named >= sizeof(draft)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    (void)stat(path, &before);
    int fd = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    int failed = write_all(fd, bytes, length) != 0 || fchmod(fd, before.st_mode & 07777) != 0;
    if (!failed && (before.st_uid != geteuid() || before.st_gid != getegid()))
        failed = fchown(fd, before.st_uid, before.st_gid) != 0;
    failed |= close(fd) != 0;
    if (!failed && rename(draft, path) == 0)
        return 0;
    int error = errno;
    unlink(draft);
    errno = error;
    return -1;
}

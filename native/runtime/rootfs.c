#include "rootfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"

enum { PLACE_MAX = 64 };
#define PRELOAD "ld.so.preload"

/* Returns a path of the file to which the descriptor refers, even if another mount covers its name. */
static const char *place(int fd, char out[PLACE_MAX])
{
    snprintf(out, PLACE_MAX, "/proc/self/fd/%d", fd);
    return out;
}

static int open_folder(int parent, const char *name)
{
    return openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static void close_kept(int fd)
{
    int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
}

/* Opens a folder below `root` without following links. Returns -1 with errno; EINVAL if the path has "..". */
static int open_below(const char *root, const char *path)
{
    char copy[4096], *rest = NULL;
    if (snprintf(copy, sizeof(copy), "%s", path) >= (int)sizeof(copy)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (char *name = strtok_r(copy, "/", &rest); name != NULL && fd >= 0; name = strtok_r(NULL, "/", &rest)) {
        errno = EINVAL;
        int next = strcmp(name, "..") == 0 ? -1 : open_folder(fd, name);
        close_kept(fd);
        fd = next;
    }
    return fd;
}

static int bind_over(int source, int target)
{
    char from[PLACE_MAX], to[PLACE_MAX];
    return mount(place(source, from), place(target, to), NULL, MS_BIND, NULL);
}

/*
 * Makes a mount read-only. It is opened again after the mount, because an earlier descriptor refers to the covered
 * file.
 */
static int make_read_only(int folder, const char *name)
{
    char at[PLACE_MAX];
    int fd = openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int done = mount(NULL, place(fd, at), NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL);
    close_kept(fd);
    return done;
}

/*
 * Opens or creates a file as a mount point, without opening its contents: an image may have a FIFO or a device there,
 * whose open(2) blocks or has an effect. Returns -1 with errno; EINVAL if it is not a regular file.
 */
static int place_of_file(int folder, const char *name, mode_t mode)
{
    struct stat found;
    int made = openat(folder, name, O_RDONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (made >= 0)
        close(made);
    else if (errno != EEXIST)
        return -1;
    int fd = openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || (fstat(fd, &found) == 0 && S_ISREG(found.st_mode)))
        return fd;
    close(fd);
    errno = EINVAL;
    return -1;
}

static int write_merged(int folder, const char *library, const char *image, size_t image_length)
{
    int fd = openat(folder, PRELOAD, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0)
        return -1;
    errno = ENOSPC; /* a short write sets no errno */
    bool whole = dprintf(fd, "%s\n", library) > 0 && write(fd, image, image_length) == (ssize_t)image_length &&
                 fchmod(fd, 0644) == 0;
    if (whole)
        return fd;
    close_kept(fd);
    return -1;
}

/*
 * Mounts the merged file over the image's file. It is on a detached tmpfs, so the image stays unchanged and nothing
 * must be cleaned up.
 */
static int put_merged(const char *root, int etc, int target, const char *library, const char *image, size_t length)
{
    char at[PLACE_MAX];
    if (mount("vgpud", place(etc, at), "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=0755") != 0)
        return -1;
    int cover = open_below(root, "etc"); /* opens the folder again, because the mount now covers it */
    int merged = cover < 0 ? -1 : open(place(cover, at), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int file = merged < 0 ? -1 : write_merged(merged, library, image, length);
    int failed = file < 0 || bind_over(file, target) != 0;
    close_kept(file);
    close_kept(merged);
    if (cover >= 0) {
        int error = errno;
        bool left = umount2(place(cover, at), MNT_DETACH) != 0;
        if (failed)
            errno = error;
        failed |= left;
        close_kept(cover);
    }
    return failed ? -1 : 0;
}

int vgpu_preload(const char *root, const char *library)
{
    size_t length = 0;
    char at[PLACE_MAX];
    int etc = open_below(root, "etc");
    if (etc < 0) {
        int top = open_below(root, "");
        if (top >= 0 && mkdirat(top, "etc", 0755) == 0)
            etc = open_folder(top, "etc");
        close_kept(top);
    }
    int target = etc < 0 ? -1 : place_of_file(etc, PRELOAD, 0644);
    char *image = target < 0 ? NULL : vgpu_read_file(place(target, at), &length);
    int failed = image == NULL || put_merged(root, etc, target, library, image, length) != 0 ||
                 make_read_only(etc, PRELOAD) != 0;
    int error = errno;
    free(image);
    errno = error;
    close_kept(target);
    close_kept(etc);
    return failed ? -1 : 0;
}

/* Opens the folder of the image's C library, in which it searches for other libraries too. */
static int open_default(const char *root, char name[PLACE_MAX])
{
    static const char *const folders[] = {"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64",
                                          "lib/x86_64-linux-gnu",     "lib/aarch64-linux-gnu",     "lib64"};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        int fd = open_below(root, folders[i]);
        if (fd >= 0 && faccessat(fd, "libc.so.6", F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
            snprintf(name, PLACE_MAX, "/%s", folders[i]);
            return fd;
        }
        if (fd >= 0)
            close(fd);
    }
    return -1;
}

static bool is_driver(const char *name)
{
    return strstr(name, ".so") != NULL && (strncmp(name, "libcuda", 7) == 0 || strncmp(name, "libnv", 5) == 0);
}

/*
 * Mounts the file that is mounted over `name` in the folder `from` over the same name in `to`. The new mount is
 * read-only if the old one is.
 */
static int show(int from, int to, const char *name)
{
    int source = openat(from, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    int target = place_of_file(to, name, 0755);
    int failed = source < 0 || target < 0 || bind_over(source, target) != 0;
    close_kept(source);
    close_kept(target);
    return failed ? -1 : 0;
}

int vgpu_libraries(const char *root, const char *folder)
{
    char name[PLACE_MAX], at[PLACE_MAX];
    int to = open_default(root, name);
    int from = to < 0 || strcmp(name, folder) == 0 ? -1 : open_below(root, folder);
    int failed = 0;
    DIR *listing = from < 0 ? NULL : opendir(place(from, at));
    for (struct dirent *entry; !failed && listing != NULL && (entry = readdir(listing)) != NULL;)
        if (is_driver(entry->d_name))
            failed = show(from, to, entry->d_name);
    int error = errno;
    if (listing != NULL)
        closedir(listing);
    errno = error;
    close_kept(from);
    close_kept(to);
    return failed;
}

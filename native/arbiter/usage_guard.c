#include "usage_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "aside.h"
#include "lease.h"
#include "rest.h"
#include "leases.h"

static struct source events = {.fd = -1, .slow = true};

#define BLOCK_BYTES 512 /* unit of st_blocks, see stat(2) */
/* allowed excess: a file system may allocate blocks in steps as large as a huge page */
#define ROOM_BYTES (2 * 1024 * 1024)

/*
 * Is the file too long, or has it too many blocks? (fallocate with FALLOC_FL_KEEP_SIZE can allocate blocks beyond its
 * end.)
 */
static bool is_too_large(const struct stat *about)
{
    const off_t most = (off_t)VGPU_USAGE_FILE_BYTES;
    const off_t room = about->st_blocks * BLOCK_BYTES;
    return about->st_size > most || room > (most / ROOM_BYTES + 1) * ROOM_BYTES;
}

static void truncate_file(void *data)
{
    const int *path_fd = data;
    char path[32];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", *path_fd);
    (void)!truncate(path, VGPU_USAGE_FILE_BYTES); /* truncate(2) also frees the blocks beyond the end of the file */
    close(*path_fd);
}

/* Cuts the file to its size. Returns false if the file must be checked again later. */
static bool cut(struct lease *lease, int path_fd)
{
    struct stat about;
    uint64_t took_ns;
    if (fstat(path_fd, &about) == 0 && !is_too_large(&about))
        return true;
    int copy = fcntl(path_fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return false;
    bool begun = aside(lease_tenant(lease), truncate_file, &copy, sizeof(copy), &took_ns) != ASIDE_NOT_BEGUN;
    if (begun) {
        lease->cuts++;
        rest_spent_on_look(lease, took_ns);
    } else {
        close(copy);
    }
    return begun;
}

static void unwatch(struct lease *lease)
{
    usage_guard_end(lease->watch);
    lease->watch = -1; /* the file is not watched again until usage_guard_renew is called */
}

static void missed(struct lease *lease)
{
    unwatch(lease);
    rest_look_later(lease);
}

/* Opens the file for its check. Returns -1 if it is gone, or must be checked again later. */
static int open_for_check(struct lease *lease)
{
    int path_fd = lease_open_path(lease);
    if (path_fd == -EMFILE || path_fd == -ENFILE || path_fd == -ENOMEM)
        missed(lease);
    return path_fd < 0 ? -1 : path_fd;
}

static void cut_grown(struct lease *lease)
{
    int path_fd = open_for_check(lease);
    if (path_fd < 0)
        return;
    if (!cut(lease, path_fd))
        missed(lease);
    close(path_fd);
}

static void take_in(struct lease *lease, uint32_t mask)
{
    if ((mask & IN_CLOSE_WRITE) != 0)
        rest_look_later(lease);
    if ((mask & IN_MODIFY) != 0)
        cut_grown(lease);
}

/* Reads one event. The event of a watched file has no name, so its size is fixed. */
static void look(struct source *source, uint32_t ready)
{
    struct inotify_event event;
    (void)ready;
    if (read(source->fd, &event, sizeof(event)) != (ssize_t)sizeof(event))
        return;
    struct lease *lease = lease_by_watch(event.wd); /* NULL: the watch has ended since the event */
    if (lease != NULL && !rest_afford(lease, 1))
        unwatch(lease);
    if (lease != NULL)
        take_in(lease, event.mask);
    if ((event.mask & IN_Q_OVERFLOW) != 0)
        lease_each(missed);
}

int usage_guard_open(void)
{
    events.fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    events.ready = look;
    return events.fd < 0 ? -errno : loop_add(&events, EPOLLIN);
}

void usage_guard_begin(struct lease *lease)
{
    char path[32];
    lease->watch = -1;
    int path_fd = open_for_check(lease);
    if (path_fd < 0)
        return;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", path_fd);
    lease->watch = events.fd >= 0 ? inotify_add_watch(events.fd, path, IN_MODIFY | IN_CLOSE_WRITE) : -1;
    if (!cut(lease, path_fd))
        missed(lease);
    close(path_fd);
}

void usage_guard_renew(struct lease *lease)
{
    if (lease->watch >= 0)
        return;
    usage_guard_begin(lease);
    /* the next tick looks at the slots, because a close may have been missed while the file was not watched */
    rest_look_later(lease);
}

void usage_guard_end(int watch)
{
    if (watch >= 0)
        inotify_rm_watch(events.fd, watch);
}

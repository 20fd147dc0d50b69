#include "slot_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "in_child.h"
#include "lease_open.h"
#include "slot.h"

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const char *folder;
    struct vgpu_usage *usage;
    uint64_t start_ns; /* distinguishes this process's claim of the slot from a later one */
    /* identity of `usage`: the program may have closed the descriptor, and its number may mean another file */
    dev_t device;
    ino_t inode;
    uint32_t slot;
    int fd; /* -1: the slot is not locked */
} held = {.fd = -1};

static bool is_usage(int fd)
{
    struct stat about;
    return fd >= 0 && fstat(fd, &about) == 0 && about.st_dev == held.device && about.st_ino == held.inode;
}

void vgpu_slot_lock_start(const char *folder, struct vgpu_usage *usage, uint32_t slot, int fd)
{
    struct stat about = {0};
    pthread_mutex_lock(&guard);
    (void)fstat(fd, &about);
    held.folder = folder;
    held.usage = usage;
    held.start_ns = usage->slots[slot].start_ns;
    held.device = about.st_dev;
    held.inode = about.st_ino;
    held.slot = slot;
    held.fd = fd;
    pthread_mutex_unlock(&guard);
}

/* Locks the slot again. Precondition: the guard is held. */
static int lock_again(void)
{
    int fd = held.folder != NULL ? vgpu_lease_file(held.folder, VGPU_USAGE_FILE, O_RDWR) : -EBADF;
    if (fd < 0)
        return fd;
    int error = is_usage(fd) ? vgpu_slot_lock_again(fd, held.usage, held.slot, held.start_ns) : -ESTALE;
    if (error != 0) {
        /* closing this descriptor releases no lock, because the process has none on the file */
        vgpu_lease_close(held.folder, VGPU_USAGE_FILE, fd);
        return error;
    }
    return held.fd = fd;
}

int vgpu_slot_lock_hold(void)
{
    pthread_mutex_lock(&guard);
    int fd = is_usage(held.fd) ? held.fd : lock_again();
    pthread_mutex_unlock(&guard);
    return fd;
}

static void drop(void)
{
    if (is_usage(held.fd))
        close(held.fd);
    held.fd = -1;
    held.folder = NULL;
}

void vgpu_slot_lock_drop(void)
{
    pthread_mutex_lock(&guard);
    drop();
    pthread_mutex_unlock(&guard);
}

static void reset(void)
{
    pthread_mutex_init(&guard, NULL);
    drop(); /* the lock belongs to the parent: closing the child's copy does not release it */
}
VGPU_IN_CHILD(reset);

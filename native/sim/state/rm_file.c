/*
 * The open files of the control device: which process each belongs to, and which stay open after their process has
 * ended (rm.c).
 */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "state.h"

#define FIRST_LOCK ((off_t)1 << 40) /* the locks are beyond the end of the file, which fcntl allows */

static struct flock lock_of(const struct sim_state *s, const struct sim_proc *p)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = FIRST_LOCK + (p - s->procs), .l_len = 1};
}

/* Returns true if an open file other than that of `fd` holds the lock of process p. */
bool sim_rm_held_by_another(const struct sim_state *s, const struct sim_proc *p, int fd)
{
    struct flock lock = lock_of(s, p);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

int sim_rm_open(struct sim_state *s, struct sim_proc *p)
{
    struct flock lock = lock_of(s, p);
    int low = sim_open_state(), fd = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    /*
     * keeps the descriptor above the standard streams: a program without them would write its output into the node's
     * state
     */
    if (low >= 0)
        close(low);
    if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

bool sim_rm_open_elsewhere(const struct sim_state *s, const struct sim_proc *p)
{
    int fd = atomic_load(&p->rm_client) == 0 ? -1 : sim_open_state();
    bool held = fd >= 0 && sim_rm_held_by_another(s, p, fd);
    if (fd >= 0)
        close(fd);
    return held;
}

void sim_rm_forget(struct sim_proc *p)
{
    atomic_store(&p->rm_client, 0);
    memset(p->objects, 0, p->object_high * sizeof(p->objects[0]));
    p->object_high = 0;
}

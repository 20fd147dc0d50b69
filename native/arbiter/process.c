#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dying.h"
#include "identity.h"
#include "invariant.h"
#include "usage_io.h"
#include "rest.h"

static uint32_t last_owner; /* registration numbers, 1 to VGPU_OWNER_SELF - 1 */

static void unlink_process(struct process *process)
{
    struct process **link = &process->lease->processes;
    while (*link != NULL && *link != process)
        link = &(*link)->next;
    VGPU_ASSERT(*link == process);
    if (*link != NULL)
        *link = process->next;
}

void process_forget(struct process *process)
{
    unlink_process(process);
    loop_remove(&process->pidfd);
    lease_release(process->lease);
}

static void process_destroy(struct source *source)
{
    free(source); /* the source is the first member */
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A look at a file's locks goes through all of them, and the tenant may have set any number. The time of each is the
 * lease's; where it was long, no other follows: its slots are left as they are. */
static pid_t holder(struct lease *lease, uint32_t slot)
{
    if (lease->shut)
        return -1;
    uint64_t before = cpu_ns();
    pid_t pid = usage_io_holder(lease->usage_fd, slot);
    rest_spent_on_locks(lease, cpu_ns() - before);
    return pid;
}

static void clear_if_dead(struct lease *lease, uint32_t slot)
{
    if (lease->shut)
        return;
    uint64_t before = cpu_ns();
    usage_io_clear_if_dead(lease->usage_fd, slot);
    rest_spent_on_locks(lease, cpu_ns() - before);
}

/* The pidfd became readable: the process is dead, and the kernel has dropped its locks. */
static void process_ended(struct source *source, uint32_t events)
{
    struct process *process = (struct process *)source;
    (void)events;
    clear_if_dead(process->lease, process->slot);
    process_forget(process);
}

static struct process *find(struct lease *lease, uint32_t slot, int32_t pid)
{
    for (struct process *p = lease->processes; p != NULL; p = p->next)
        if (p->slot == slot && p->pid == pid)
            return p;
    return NULL;
}

static struct process *track(struct lease *lease, uint32_t slot, int32_t pid, int pidfd)
{
    struct process *process = calloc(1, sizeof(*process));
    if (process == NULL)
        return NULL;
    last_owner = last_owner + 1 < VGPU_OWNER_SELF ? last_owner + 1 : 1;
    *process = (struct process){
        .pidfd = {.fd = pidfd, .ready = process_ended, .destroy = process_destroy},
        .lease = lease,
        .next = lease->processes,
        .pid = pid,
        .slot = slot,
        .owner = last_owner,
    };
    if (loop_add(&process->pidfd, EPOLLIN) != 0) {
        free(process);
        return NULL;
    }
    lease->processes = process;
    lease_hold(lease); /* its caller does already: this cannot fail */
    return process;
}

static struct process *met_again(struct process *known)
{
    known->left = false;
    return known;
}

/* A program that closed all its files (closefrom(3)) has lost its slot's lock, but still accounts there. */
static bool accounts_unlocked(const struct process *process, int32_t pid)
{
    return process->pid == pid && identity_alive(process->pidfd.fd) && identity_has_mapped(pid, process->lease);
}

struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int pidfd, int *error)
{
    pid_t locked_by = holder(lease, slot);
    struct process *known = find(lease, slot, pid);
    bool holds = locked_by == pid || (locked_by == 0 && known != NULL && accounts_unlocked(known, pid));
    if (!holds || !identity_alive(pidfd)) {
        *error = holds ? ESRCH : EPERM;
        return NULL;
    }
    if (known != NULL && identity_alive(known->pidfd.fd))
        return met_again(known);
    if (known != NULL) /* a dead one of the same number: its end is not told of yet */
        process_forget(known);
    int own = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    struct process *process = own >= 0 ? track(lease, slot, pid, own) : NULL;
    if (process == NULL) {
        *error = own < 0 ? errno : ENOMEM;
        if (own >= 0)
            close(own);
    }
    return process;
}

/* Forgets a process that lives on after an exec, without its slot, and clears the slot. */
static bool forgotten(struct process *process)
{
    struct lease *lease = process->lease;
    if (holder(lease, process->slot) == process->pid || vgpu_process_dying(process->pid) || lease->shut ||
        accounts_unlocked(process, process->pid))
        return false;
    clear_if_dead(lease, process->slot); /* it may have let go since the look above */
    process_forget(process);
    return true;
}

void process_moved(struct process *now)
{
    for (struct process *p = now->lease->processes, *next; p != NULL; p = next) {
        next = p->next;
        bool former = p != now && p->pid == now->pid && holder(now->lease, p->slot) != p->pid;
        if (!former)
            continue;
        clear_if_dead(now->lease, p->slot);
        process_forget(p);
    }
}

void process_left(struct lease *lease, uint32_t owner)
{
    struct process *process = lease->processes;
    while (process != NULL && process->owner != owner)
        process = process->next;
    if (process == NULL || forgotten(process))
        return;
    process->left = true; /* it may be in the midst of closing its files: the lock's goes after the connection's */
    rest_look_later(lease);
}

void process_look_again(struct lease *lease)
{
    for (struct process *p = lease->processes, *next; p != NULL; p = next) {
        next = p->next;
        if (p->left && !forgotten(p))
            p->left = false;
    }
}

void process_sweep(struct lease *lease)
{
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS && !lease->shut; slot++)
        if (usage_io_owner(lease->usage_fd, slot) != 0 && holder(lease, slot) == 0)
            clear_if_dead(lease, slot);
}

void process_adopt_all(struct lease *lease)
{
    int ignored;
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS && !lease->shut; slot++) {
        pid_t pid = holder(lease, slot);
        int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
        if (pidfd >= 0 && identity_belongs(pid, lease))
            process_watch(lease, slot, pid, pidfd, &ignored);
        if (pidfd >= 0)
            close(pidfd);
    }
}

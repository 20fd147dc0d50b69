#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "aside.h"
#include "dying.h"
#include "identity.h"
#include "invariant.h"
#include "leases.h"
#include "looks.h"
#include "usage_io.h"
#include "rest.h"

static uint32_t last_owner; /* last registration number given out, 1 to VGPU_OWNER_SELF - 1 */

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
    free(source); /* the source is the first member of the object, so this frees the object */
}

/*
 * Facts about a slot and a process from the kernel. They are read on another thread, because a tenant can delay the
 * reads.
 */
struct about {
    int usage_fd; /* a copy of the lease's usage_fd */
    uint32_t slot;
    pid_t pid;
    pid_t holder; /* pid that holds the slot's lock; 0: none; -1: unknown */
    bool dying;
    struct identity_image image;
};

static void find_out(void *data)
{
    struct about *about = data;
    about->holder = usage_io_holder(about->usage_fd, about->slot);
    about->dying = vgpu_process_dying(about->pid);
    about->image = identity_image(about->pid);
    close(about->usage_fd);
}

static void clear_slot(void *data)
{
    const struct about *about = data;
    usage_io_clear_if_dead(about->usage_fd, about->slot);
    close(about->usage_fd);
}

/* Clears the slot, or finds out which process holds it. */
static void clear_or_find_out(void *data)
{
    struct about *about = data;
    if (usage_io_clear_if_dead(about->usage_fd, about->slot))
        about->holder = 0;
    else
        about->holder = usage_io_holder(about->usage_fd, about->slot);
    close(about->usage_fd);
}

/*
 * Runs `work` on another thread, and charges its time to the lease. After several expensive looks in a row the lease is
 * shut: no look is made any more, and the lease's slots stay as they are.
 */
static enum aside look(struct lease *lease, void (*work)(void *data), struct about *about)
{
    uint64_t took_ns;
    about->usage_fd = lease->shut ? -1 : fcntl(lease->usage_fd, F_DUPFD_CLOEXEC, 0);
    if (about->usage_fd < 0)
        return ASIDE_NOT_BEGUN;
    enum aside done = aside(lease_tenant(lease), work, about, sizeof(*about), &took_ns);
    if (done == ASIDE_NOT_BEGUN)
        close(about->usage_fd);
    else
        rest_spent_on_look(lease, took_ns);
    return done;
}

static struct about ask(struct lease *lease, uint32_t slot, pid_t pid)
{
    struct about about = {.slot = slot, .pid = pid, .holder = -1};
    if (look(lease, find_out, &about) != ASIDE_DONE)
        about.holder = -1;
    return about;
}

bool process_clear(struct lease *lease, uint32_t slot)
{
    struct about about = {.slot = slot};
    return look(lease, clear_slot, &about) != ASIDE_NOT_BEGUN || lease->shut;
}

static void look_later(struct process *process, enum process_look why)
{
    process->later = why;
    rest_look_later(process->lease);
}

/*
 * Clears the slot and forgets the process, now or at a later tick. Precondition: the process no longer counts memory in
 * the slot.
 */
static void clear_and_forget(struct process *process)
{
    if (process_clear(process->lease, process->slot))
        process_forget(process);
    else
        look_later(process, PROCESS_ENDED);
}

static void look_due(struct process *process, enum process_look why)
{
    if (why > process->due)
        process->due = why;
    looks_add(process->lease);
}

/* Called when the pidfd is readable: the process is dead, and the kernel has released its locks. */
static void process_ended(struct source *source, uint32_t events)
{
    (void)events;
    loop_pause(source);
    look_due((struct process *)source, PROCESS_ENDED);
}

static struct process *find(struct lease *lease, uint32_t slot, int32_t pid)
{
    for (struct process *p = lease->processes; p != NULL; p = p->next)
        if (p->slot == slot && p->pid == pid)
            return p;
    return NULL;
}

static struct process *track(struct lease *lease, const struct about *about, int pidfd)
{
    struct process *process = calloc(1, sizeof(*process));
    if (process == NULL)
        return NULL;
    last_owner = last_owner + 1 < VGPU_OWNER_SELF ? last_owner + 1 : 1;
    *process = (struct process){
        .pidfd = {.fd = pidfd, .slow = true, .ready = process_ended, .destroy = process_destroy},
        .lease = lease,
        .next = lease->processes,
        .pid = about->pid,
        .slot = about->slot,
        .owner = last_owner,
        .image = about->image,
    };
    if (loop_add(&process->pidfd, EPOLLIN) != 0) {
        free(process);
        return NULL;
    }
    lease->processes = process;
    lease_hold(lease); /* the call cannot fail, because the caller holds the lease's files too */
    return process;
}

static struct process *met_again(struct process *known, const struct about *about)
{
    known->later = PROCESS_NONE;
    known->due = PROCESS_NONE;
    known->image = about->image;
    return known;
}

/*
 * Does the process still count its memory in the slot, without the slot's lock? A program that closed all its files
 * (closefrom(3)) has lost the lock, but still counts memory there. After an exec it does not.
 */
static bool accounts_unlocked(const struct process *process, const struct about *about)
{
    return process->pid == about->pid && identity_same_image(process->image, about->image) &&
           identity_alive(process->pidfd.fd);
}

struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int pidfd, int *error)
{
    struct about about = ask(lease, slot, pid);
    struct process *known = find(lease, slot, pid);
    bool holds = about.holder == pid || (about.holder == 0 && known != NULL && accounts_unlocked(known, &about));
    if (!holds || !identity_alive(pidfd)) {
        *error = holds ? ESRCH : EPERM;
        return NULL;
    }
    if (known != NULL && identity_alive(known->pidfd.fd))
        return met_again(known, &about);
    if (known != NULL) /* a dead process with the same pid, whose end is not reported yet */
        process_forget(known);
    int own = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    struct process *process = own >= 0 ? track(lease, &about, own) : NULL;
    if (process == NULL) {
        *error = own < 0 ? errno : ENOMEM;
        if (own >= 0)
            close(own);
    }
    return process;
}

/*
 * Clears the slot of a process that lives on after an exec, and forgets the process. Returns false if the process keeps
 * the slot.
 */
static bool forgotten(struct process *process)
{
    struct lease *lease = process->lease;
    struct about about = ask(lease, process->slot, process->pid);
    if (about.holder < 0 || about.holder == process->pid || about.dying || accounts_unlocked(process, &about))
        return false;
    clear_and_forget(process); /* the slot is cleared only if it has no lock by then: another process may hold it */
    return true;
}

/*
 * Handles the former record of a process that has another slot now: clears the former slot and removes the record,
 * unless the process still has the former slot's lock.
 */
static void forget_moved(struct process *process)
{
    struct about about = {.slot = process->slot};
    if (look(process->lease, clear_or_find_out, &about) == ASIDE_DONE && about.holder >= 0 &&
        about.holder != process->pid)
        process_forget(process);
}

void process_moved(struct process *now)
{
    struct process *former = NULL;
    for (struct process *p = now->lease->processes; p != NULL; p = p->next) {
        if (p == now || p->pid != now->pid)
            continue;
        if (former != NULL)
            look_due(former, PROCESS_MOVED);
        former = p;
    }
    if (former != NULL)
        forget_moved(former);
}

/*
 * Queues a second look at a process that kept its slot at the first look, after its connection had ended. The second
 * look is the last one.
 */
static void look_again_once(struct process *process)
{
    if (process->later == PROCESS_NONE)
        look_later(process, PROCESS_LEFT);
    else
        process->later = PROCESS_NONE;
}

static void look_now(struct process *process, enum process_look why)
{
    if (why == PROCESS_MOVED)
        forget_moved(process);
    else if (why == PROCESS_ENDED)
        clear_and_forget(process);
    else if (!forgotten(process))
        look_again_once(process);
}

bool process_look_at_one(struct lease *lease)
{
    struct process *process = lease->processes;
    while (process != NULL && process->due == PROCESS_NONE)
        process = process->next;
    if (process == NULL)
        return false;
    enum process_look why = process->due;
    process->due = PROCESS_NONE;
    look_now(process, why);
    return true;
}

void process_left(struct lease *lease, uint32_t owner)
{
    struct process *process = lease->processes;
    while (process != NULL && process->owner != owner)
        process = process->next;
    if (process == NULL || process->later == PROCESS_ENDED)
        return;
    process->later = PROCESS_NONE;
    look_due(process, PROCESS_LEFT);
}

void process_look_again(struct lease *lease)
{
    for (struct process *p = lease->processes; p != NULL; p = p->next)
        if (p->later != PROCESS_NONE)
            look_due(p, p->later);
}

/*
 * Returns the pid that holds a slot of a lease which is being added. The slots are read on this thread, because one
 * call on another thread costs more than all of them.
 */
static pid_t holder_here(struct lease *lease, uint32_t slot)
{
    struct timespec before;
    struct timespec after;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    pid_t pid = usage_io_holder(lease->usage_fd, slot);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    int64_t took_ns = (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    rest_spent_on_look(lease, (uint64_t)took_ns);
    return pid;
}

void process_sweep(struct lease *lease)
{
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS && !lease->shut; slot++)
        if (usage_io_owner(lease->usage_fd, slot) != 0 && holder_here(lease, slot) == 0)
            process_clear(lease, slot);
}

void process_adopt_all(struct lease *lease)
{
    int ignored;
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS && !lease->shut; slot++) {
        pid_t pid = holder_here(lease, slot);
        int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
        if (pidfd >= 0 && identity_belongs(pid, lease))
            process_watch(lease, slot, pid, pidfd, &ignored);
        if (pidfd >= 0)
            close(pidfd);
    }
}

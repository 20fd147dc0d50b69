#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dying.h"
#include "page.h"

static uint32_t last_owner; /* registration numbers, 1 to VGPU_OWNER_SELF - 1 */

static void unlink_process(struct process *process)
{
    struct process **link = &process->lease->processes;
    while (*link != NULL && *link != process)
        link = &(*link)->next;
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

/* The pidfd became readable: the process is dead, and the kernel has dropped its locks. */
static void process_ended(struct source *source, uint32_t events)
{
    struct process *process = (struct process *)source;
    (void)events;
    page_clear_if_dead(process->lease->usage_fd, process->slot);
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

struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int *error)
{
    struct process *known = find(lease, slot, pid);
    if (known != NULL && page_holder(lease->usage_fd, slot) == pid)
        return known;
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0) {
        *error = errno;
        return NULL;
    }
    if (page_holder(lease->usage_fd, slot) != pid) {
        close(pidfd);
        *error = EPERM;
        return NULL;
    }
    struct process *process = track(lease, slot, pid, pidfd);
    if (process == NULL) {
        close(pidfd);
        *error = ENOMEM;
    }
    return process;
}

static bool dying(const struct lease *lease, uint32_t slot)
{
    for (const struct process *p = lease->processes; p != NULL; p = p->next)
        if (p->slot == slot && vgpu_process_dying(p->pid))
            return true;
    return false;
}

void process_sweep(struct lease *lease)
{
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS; slot++)
        if (page_owner(lease->usage_fd, slot) != 0 && page_holder(lease->usage_fd, slot) == 0 && !dying(lease, slot))
            page_clear_if_dead(lease->usage_fd, slot);
    for (struct process *p = lease->processes, *next; p != NULL; p = next) {
        next = p->next;
        if (page_holder(lease->usage_fd, p->slot) != p->pid && !vgpu_process_dying(p->pid)) {
            page_clear_if_dead(lease->usage_fd, p->slot); /* it may have let go since the look above */
            process_forget(p);
        }
    }
}

void process_adopt_all(struct lease *lease)
{
    int ignored;
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS; slot++) {
        pid_t pid = page_holder(lease->usage_fd, slot);
        if (pid > 0)
            process_watch(lease, slot, pid, &ignored);
    }
}

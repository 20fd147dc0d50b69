#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "aside.h"
#include "leases.h"
#include "rest.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* value in include/uapi/asm-generic/socket.h since Linux 6.5 */
#endif

/* size of the buffer for a line of /proc; a longer line of mountinfo, with long paths, is read in pieces */
#define LINE_BYTES 4352
#define MOUNTS_MAX 2000

bool identity_alive(int pidfd)
{
    struct pollfd dead = {.fd = pidfd, .events = POLLIN};
    return poll(&dead, 1, 0) == 0;
}

static FILE *open_proc(pid_t pid, const char *name)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
    return fopen(path, "re");
}

static bool runs_as(pid_t pid, uid_t owner)
{
    char line[LINE_BYTES];
    unsigned real;
    unsigned effective;
    bool same = false;
    FILE *status = open_proc(pid, "status");
    if (status == NULL)
        return false;
    while (fgets(line, sizeof(line), status) != NULL)
        if (sscanf(line, "Uid: %u %u", &real, &effective) == 2)
            same = real == owner && effective == owner;
    fclose(status);
    return same;
}

/*
 * Is the process in a user namespace that `owner` made? The arbiter's own namespace does not count, because root made
 * it and every process is in it.
 */
static bool in_user_namespace_of(pid_t pid, uid_t owner)
{
    char path[64];
    uid_t uid = (uid_t)-1;
    snprintf(path, sizeof(path), "/proc/%d/ns/user", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    int parent = ioctl(fd, NS_GET_PARENT);
    bool made = parent >= 0 && ioctl(fd, NS_GET_OWNER_UID, &uid) == 0 && uid == owner && uid != 0;
    if (parent >= 0)
        close(parent);
    close(fd);
    return made;
}

/*
 * Is the lease `id` mounted in the process's mount namespace? mountinfo has lines ID PARENT DEVICE ROOT PLACE ...; see
 * proc(5).
 */
static bool has_mounted(pid_t pid, const char *id)
{
    char line[LINE_BYTES];
    char root[LINE_BYTES];
    char place[LINE_BYTES];
    char wanted[VGPU_ID_BYTES + 32];
    bool found = false;
    FILE *mounts = open_proc(pid, "mountinfo");
    if (mounts == NULL)
        return false;
    snprintf(wanted, sizeof(wanted), "/leases/%s", id);
    for (int i = 0; !found && i < MOUNTS_MAX && fgets(line, sizeof(line), mounts) != NULL; i++) {
        if (sscanf(line, "%*d %*d %*s %s %s", root, place) != 2 || strcmp(place, VGPU_LEASE_MOUNT) != 0)
            continue;
        const char *at = strstr(root, wanted);
        const char *rest = at != NULL ? at + strlen(wanted) : NULL;
        found = rest != NULL && (*rest == '\0' || strcmp(rest, "/" VGPU_ANYONE_FOLDER) == 0);
    }
    fclose(mounts);
    return found;
}

/*
 * Reads the addresses of the process's program from stat, whose fields are PID (NAME) STATE ...; see proc(5). NAME may
 * contain any character. If the arbiter may not see the addresses, the kernel shows zeros.
 */
struct identity_image identity_image(pid_t pid)
{
    enum { STATE = 3, START_CODE = 26, START_STACK = 28, START_BRK = 47 };
    char line[LINE_BYTES];
    struct identity_image image = {0};
    FILE *stat = open_proc(pid, "stat");
    if (stat == NULL)
        return image;
    size_t size = fread(line, 1, sizeof(line) - 1, stat);
    fclose(stat);
    line[size] = '\0';
    char *at = strrchr(line, ')');
    char *rest = NULL;
    int field = STATE;
    for (char *word = at != NULL ? strtok_r(at + 1, " ", &rest) : NULL; word != NULL;
         word = strtok_r(NULL, " ", &rest), field++) {
        if (field == START_CODE)
            image.start_code = strtoull(word, NULL, 10);
        else if (field == START_STACK)
            image.start_stack = strtoull(word, NULL, 10);
        else if (field == START_BRK)
            image.start_brk = strtoull(word, NULL, 10);
    }
    return image;
}

bool identity_same_image(struct identity_image a, struct identity_image b)
{
    return a.start_code == b.start_code && a.start_stack == b.start_stack && a.start_brk == b.start_brk;
}

struct whose {
    pid_t pid;
    uid_t owner;
    bool anyone;
    bool belongs;
    char id[VGPU_ID_BYTES];
};

static void find_out(void *data)
{
    struct whose *whose = data;
    whose->belongs = (!whose->anyone &&
                      (runs_as(whose->pid, whose->owner) || in_user_namespace_of(whose->pid, whose->owner))) ||
                     has_mounted(whose->pid, whose->id);
}

bool identity_belongs(pid_t pid, struct lease *lease)
{
    uint64_t took_ns;
    struct whose whose = {.pid = pid, .owner = lease->owner, .anyone = lease->anyone};
    memcpy(whose.id, lease->id, sizeof(whose.id));
    enum aside done = aside(lease_tenant(lease), find_out, &whose, sizeof(whose), &took_ns);
    if (done != ASIDE_NOT_BEGUN)
        rest_spent_on_look(lease, took_ns);
    return done == ASIDE_DONE && whose.belongs;
}

/*
 * Before Linux 6.5: opens the process with the peer's pid. The pid may have been reused, so the process is checked: it
 * must be one that may have connected.
 */
static int open_by_number(pid_t pid, struct lease *lease)
{
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return -errno;
    if (identity_belongs(pid, lease) && identity_alive(pidfd))
        return pidfd;
    close(pidfd);
    return -EPERM;
}

int identity_of_peer(int socket_fd, struct lease *lease, pid_t *pid)
{
    struct ucred peer;
    int pidfd = -1;
    socklen_t size = sizeof(peer);
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return -errno;
    *pid = peer.pid;
    size = sizeof(pidfd);
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) {
        if (identity_alive(pidfd))
            return pidfd;
        close(pidfd);
        return -ESRCH;
    }
    return errno == ENOPROTOOPT ? open_by_number(peer.pid, lease) : -errno;
}

/*
 * impostor.c: keeps a slot's lock and a connection under the pid of a dead process, and then starts another user's
 * process with that pid.
 *
 *   impostor LEASE SLOT register|stay
 * A child that shares the descriptor table (clone with CLONE_FILES) locks the slot, connects and ends. Lock and
 * connection stay open under its pid. Then clone3 with set_tid starts a process of another uid with that pid.
 * It prints the pid. register: registers on the connection, and prints the kind of the answer. stay: ends with standard
 * input. Exit status 3: pids cannot be chosen here.
 */
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lease.h"

enum { STRANGER_UID = 65534, CANNOT = 3 };

static int take(const char *lease, uint32_t slot, int line)
{
    char path[256];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct flock lock = {.l_type = F_WRLCK,
                         .l_start = (off_t)(offsetof(struct vgpu_usage, slots) + slot * sizeof(struct vgpu_slot)),
                         .l_len = 1};
    snprintf(path, sizeof(path), "%s/%s", lease, VGPU_USAGE_FILE);
    int usage = open(path, O_RDWR);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", lease, VGPU_ARBITER_SOCKET);
    if (usage < 0 || fcntl(usage, F_SETLK, &lock) != 0)
        return 1;
    return connect(line, (struct sockaddr *)&address, sizeof(address)) == 0 ? 0 : 1;
}

static pid_t stranger_of(pid_t number)
{
    struct clone_args how = {.exit_signal = SIGCHLD, .set_tid = (uint64_t)(uintptr_t)&number, .set_tid_size = 1};
    int is_one[2];
    char byte;
    /* the stranger never runs as the lease's owner: its real uid differs from the start */
    if (pipe(is_one) != 0 || setresuid(STRANGER_UID, (uid_t)-1, (uid_t)-1) != 0)
        return -1;
    pid_t stranger = (pid_t)syscall(SYS_clone3, &how, sizeof(how));
    if (stranger == 0) {
        if (setgid(STRANGER_UID) != 0 || setuid(STRANGER_UID) != 0 || write(is_one[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(is_one[1]);
    if (setresuid(0, (uid_t)-1, (uid_t)-1) != 0)
        return -1;
    return stranger > 0 && read(is_one[0], &byte, 1) == 1 ? stranger : -1;
}

static int register_now(int line, uint32_t slot)
{
    struct vgpu_message message = {.kind = VGPU_MSG_REGISTER, .version = VGPU_LEASE_VERSION, .slot = slot};
    if (send(line, &message, sizeof(message), MSG_NOSIGNAL) != (ssize_t)sizeof(message) ||
        recv(line, &message, sizeof(message), 0) != (ssize_t)sizeof(message))
        return (int)VGPU_MSG_REFUSED; /* the arbiter closed the connection, which is a refusal too */
    return (int)message.kind;
}

int main(int argc, char **argv)
{
    int status;
    char byte;
    if (argc != 4)
        return 2;
    uint32_t slot = (uint32_t)atoi(argv[2]);
    int line = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    pid_t child = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, NULL, NULL, NULL, 0);
    if (child == 0)
        _exit(take(argv[1], slot, line));
    if (waitpid(child, &status, 0) != child || status != 0)
        return 1;
    pid_t stranger = stranger_of(child);
    if (stranger < 0)
        return CANNOT;
    bool registers = strcmp(argv[3], "register") == 0;
    printf("%d\n", (int)stranger);
    fflush(stdout);
    if (registers)
        printf("%d\n", (int)register_now(line, slot));
    while (!registers && read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    kill(stranger, SIGKILL);
    return 0;
}

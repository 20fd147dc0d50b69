/*
 * identity.h: identifies processes by pidfds. A pid identifies a process only while it lives: locks and credentials can
 * keep the pid of a dead process (clone with CLONE_FILES), and the kernel reuses it.
 */
#ifndef ARBITER_IDENTITY_H
#define ARBITER_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct lease;

/*
 * Returns a pidfd of the process that connected this socket (SO_PEERPIDFD, Linux 6.5), and sets *pid. Without this
 * option it is a pidfd of the process that has the peer's pid now, if that process belongs to the lease
 * (identity_belongs). Must be called right after accept. Returns -errno on failure: -ESRCH if the process has ended,
 * and without SO_PEERPIDFD -EPERM if it does not belong to the lease.
 */
int identity_of_peer(int socket_fd, struct lease *lease, pid_t *pid);

/* Returns whether the process is alive: if so, its pid still belongs to it and not to a later process. */
bool identity_alive(int pidfd);

/*
 * Can the process with this pid belong to the lease? It can if it runs as the lease's uid, in a user namespace of that
 * uid, or in a mount namespace with the lease at its mount point (a container). For a lease that any user may write,
 * only the mount counts. Returns false if the check does not end. Reads /proc only, never a file of the process, on
 * another thread (aside.h).
 */
bool identity_belongs(pid_t pid, struct lease *lease);

/*
 * The addresses of a process's program (proc(5), /proc/PID/stat). They change with an exec, so they distinguish a
 * program that closed all its files from a new program. The read may wait for the end of an exec, so it must be made on
 * another thread (aside.h).
 */
struct identity_image {
    uint64_t start_code;
    uint64_t start_stack;
    uint64_t start_brk;
};
struct identity_image identity_image(pid_t pid); /* returns zeros if the process has ended */
bool identity_same_image(struct identity_image a, struct identity_image b);

#endif

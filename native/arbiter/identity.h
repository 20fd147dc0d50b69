/*
 * identity.h: which process this is. A number says it only while the process lives, and locks and credentials keep the
 * number of a dead one (clone with CLONE_FILES), which the kernel gives out again: so a process is its pidfd.
 */
#ifndef ARBITER_IDENTITY_H
#define ARBITER_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct lease;

/*
 * The process that connected this socket: its pidfd from the kernel (SO_PEERPIDFD, Linux 6.5), and *pid. Where the
 * kernel has no such option: of the process that has the peer's number now, if that belongs to the lease
 * (identity_belongs). To be asked as soon as the connection is accepted. -errno: it is gone, or another's.
 */
int identity_of_peer(int socket_fd, struct lease *lease, pid_t *pid);

/* Does the process live? What had its number while the pidfd says so was this process. */
bool identity_alive(int pidfd);

/*
 * May a process of which only the number is known be one of the lease's? It runs as the uid that the lease is for, or in
 * a user namespace of that uid's, or in a mount namespace that has the lease at its place (a container's). Reads what
 * the kernel makes (/proc), never a file of the process's, and asks aside (aside.h).
 */
bool identity_belongs(pid_t pid, struct lease *lease);

/*
 * Where the kernel put the program that a process runs (proc(5), /proc/PID/stat): other numbers after an exec, which
 * tells a program that closed all its files from one that is another program now. It may wait for the end of an exec:
 * to be asked aside (aside.h).
 */
struct identity_image {
    uint64_t start_code;
    uint64_t start_stack;
    uint64_t start_brk;
};
struct identity_image identity_image(pid_t pid); /* zeros: it is gone */
bool identity_same_image(struct identity_image a, struct identity_image b);

#endif

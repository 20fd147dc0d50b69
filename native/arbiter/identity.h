/*
 * identity.h: which process this is. A number says it only while the process lives, and locks and credentials keep the
 * number of a dead one (clone with CLONE_FILES), which the kernel gives out again: so a process is its pidfd.
 */
#ifndef ARBITER_IDENTITY_H
#define ARBITER_IDENTITY_H

#include <stdbool.h>
#include <sys/types.h>

struct lease;

/*
 * The process that connected this socket: its pidfd from the kernel (SO_PEERPIDFD, Linux 6.5), and *pid. Where the
 * kernel has no such option: of the process that has the peer's number now, if that belongs to the lease
 * (identity_belongs). To be asked as soon as the connection is accepted. -errno: it is gone, or another's.
 */
int identity_of_peer(int socket_fd, const struct lease *lease, pid_t *pid);

/* Does the process live? What had its number while the pidfd says so was this process. */
bool identity_alive(int pidfd);

/*
 * May a process of which only the number is known be one of the lease's? It runs as the uid that the lease is for, or in
 * a user namespace of that uid's, or in a mount namespace that has the lease at its place (a container's). Reads what
 * the kernel makes (/proc), never a file of the process's.
 */
bool identity_belongs(pid_t pid, const struct lease *lease);

/*
 * Has the process the lease's `usage` mapped? It had it when it registered, and loses it by an exec: this tells a program
 * that closed all its files from one that is another program now. Goes through MAPS_MAX mappings at most (proc(5),
 * /proc/PID/maps); a process with more counts as one that has it.
 */
bool identity_has_mapped(pid_t pid, const struct lease *lease);

#endif

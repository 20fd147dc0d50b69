/*
 * untrusted.h: keeps descriptors that tenants pass (SCM_RIGHTS) away from the arbiter, whose messages need none. The
 * kernel closes a passed descriptor within the receiver's recv(2), close(2) or exit, and that close may wait for as long
 * as the tenant likes. From Linux 6.16 the kernel refuses such descriptors. On an older kernel the arbiter receives no
 * message that has some, and a keeper (keeper.h) holds a copy of each socket, so that the arbiter's close ends at once.
 */
#ifndef ARBITER_UNTRUSTED_H
#define ARBITER_UNTRUSTED_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Has the kernel refuse descriptors (EPERM) to tenants that connect to this socket from now on (Linux 6.16). */
void untrusted_listen(int listen_fd);

/*
 * Has the keeper hold a socket that was accepted, or its listener, for `user`, if the kernel cannot refuse descriptors.
 */
void untrusted_hold(int fd, uint64_t user);

/* If the keeper has ended, starts another one, which then holds the same sockets. untrusted_close does the same. */
void untrusted_renew(void);

/*
 * Receives as recv with MSG_TRUNC. Fails with EPERM if the message has descriptors; the message then stays in the
 * socket.
 */
ssize_t untrusted_recv(int fd, void *data, size_t size);

/*
 * Closes a socket. If the kernel cannot refuse descriptors, a keeper has the last copy of the socket, or is given one
 * now, unless no keeper can be started.
 */
void untrusted_close(int fd);

#endif

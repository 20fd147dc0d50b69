/*
 * untrusted.h: keeps descriptors that tenants pass (SCM_RIGHTS) away from the arbiter, whose messages need none. The
 * kernel closes a passed descriptor within the receiver's recv(2) or close(2), and the last close of a TCP socket with
 * SO_LINGER and unsent bytes waits for as long as the tenant chose.
 */
#ifndef ARBITER_UNTRUSTED_H
#define ARBITER_UNTRUSTED_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* the longest wait of a call below for sockets that a tenant passed, on a kernel before Linux 6.16 */
#define UNTRUSTED_WAIT_NS 1000000u

/*
 * Has the kernel refuse descriptors (EPERM) to tenants that connect to this socket from now on (Linux 6.16). On an
 * older kernel a timer of the process (ITIMER_REAL) interrupts the waits of the functions below.
 */
void untrusted_listen(int listen_fd);

/* As recv with MSG_TRUNC. Fails with EPERM if the message came with descriptors. */
ssize_t untrusted_recv(int fd, void *data, size_t size);

/* As close. Returns the nanoseconds that it took on an older kernel, else 0. */
uint64_t untrusted_close(int fd);

#endif

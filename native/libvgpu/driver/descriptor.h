/* descriptor.h: helpers for libvgpu's own descriptors. */
#ifndef VGPU_DESCRIPTOR_H
#define VGPU_DESCRIPTOR_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/*
 * Moves a new descriptor above 2. If the program was started with standard input, output or error closed, the kernel
 * may return the closed number, and the program would read or write libvgpu's file. Takes a descriptor, or the -errno
 * of its open. Returns a descriptor above 2, or -errno. Precondition: no lock is held through the descriptor.
 */
static inline int vgpu_above_stdio(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    int error = errno;
    close(fd);
    return above >= 0 ? above : -error;
}

#endif

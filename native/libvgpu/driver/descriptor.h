/* descriptor.h: descriptors of libvgpu's own. */
#ifndef VGPU_DESCRIPTOR_H
#define VGPU_DESCRIPTOR_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* A descriptor just opened, or -errno of its call: as it is, unless the program was started with its standard input,
 * output or error closed and the kernel gave out that number, at which the program reads and writes. Closes it then and
 * gives another above those; -errno: there is none. The old one must not hold a lock yet. */
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

/*
 * libvgpu-sim-rm.so serves the control device of a simulated node in a process that does not have the simulated
 * libcuda. It is preloaded, so that its ioctl comes before the C library's. The node is the one whose state file the
 * call's descriptor belongs to. stat of the control device returns the data of the file that VGPU_SIM_STATE names, which
 * stands for the device.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../common/rm.h"
#include "../state/state.h"

static struct sim_state *node_of(int fd)
{
    static struct sim_state *s;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char link[64], path[4096];
    pthread_mutex_lock(&lock);
    if (s == NULL) {
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, path, sizeof(path) - 1);
        path[n < 0 ? 0 : n] = '\0';
        s = path[0] == '/' ? sim_attach_path(path) : NULL;
    }
    pthread_mutex_unlock(&lock);
    return sim_rm_is(s, fd) ? s : NULL;
}

__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    struct sim_state *s = _IOC_TYPE(request) == RM_IOCTL_TYPE ? node_of(fd) : NULL;
    return s != NULL ? sim_rm_ioctl(s, fd, request, argument) : (int)syscall(SYS_ioctl, fd, request, argument);
}

__attribute__((visibility("default"))) int stat(const char *path, struct stat *about)
{
    const char *state = strcmp(path, RM_CONTROL_DEVICE) == 0 ? getenv(SIM_ENV_STATE) : NULL;
    return fstatat(AT_FDCWD, state != NULL ? state : path, about, 0);
}

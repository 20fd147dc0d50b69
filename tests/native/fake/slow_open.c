/*
 * slow_open.c: preloaded; delays the caller by 3 ms after open(2) and openat(2), so other threads run meanwhile.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DELAY_US 3000

static int slow(int folder, const char *path, int flags, va_list rest)
{
    int fd = (int)syscall(SYS_openat, folder, path, flags, va_arg(rest, unsigned));
    usleep(DELAY_US);
    return fd;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int fd = slow(AT_FDCWD, path, flags, rest);
    va_end(rest);
    return fd;
}

int openat(int folder, const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int fd = slow(folder, path, flags, rest);
    va_end(rest);
    return fd;
}

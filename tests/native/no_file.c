/*
 * no_file.c: preloaded into the arbiter. pidfd_getfd(2) fails with EBADF while the file named by NO_FILE_WHILE exists,
 * as before Linux 6.9 for a process that is exiting. While that of NO_PIDFD_WHILE exists, pidfd_open(2) fails.
 */

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#define PIDFD_OPEN 434
#define PIDFD_GETFD 438
#define ARGUMENTS 6

static int exists(const char *variable)
{
    const char *file = getenv(variable);
    return file != NULL && access(file, F_OK) == 0;
}

__attribute__((visibility("default"))) long syscall(long number, ...)
{
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[ARGUMENTS];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < ARGUMENTS; i++)
        a[i] = va_arg(arguments, long);
    va_end(arguments);
    if ((number == PIDFD_GETFD && exists("NO_FILE_WHILE")) || (number == PIDFD_OPEN && exists("NO_PIDFD_WHILE"))) {
        errno = EBADF;
        return -1;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

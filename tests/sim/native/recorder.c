/*
 * recorder.c: an ioctl function in front of the simulated driver's. It prints the classes of the objects that are made,
 * and says when one is freed or scheduled.
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include "rm.h"
int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int (*next)(int, unsigned long, ...) = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "ioctl");
    int result = next(fd, request, argument);
    const struct rm_alloc *a = argument;
    if (_IOC_TYPE(request) == 'F' && _IOC_NR(request) == RM_ESCAPE_ALLOC && result == 0 && a->status == 0)
        fprintf(stderr, "%x ", a->class_id);
    if (_IOC_TYPE(request) == 'F' && _IOC_NR(request) == RM_ESCAPE_FREE)
        fprintf(stderr, "free ");
    const struct rm_control *c = argument;
    if (_IOC_TYPE(request) == 'F' && _IOC_NR(request) == RM_ESCAPE_CONTROL && c->command == RM_SCHEDULE_GROUP)
        fprintf(stderr, "schedule ");
    return result;
}

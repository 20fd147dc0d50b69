#include <dlfcn.h>

void *next_of(const char *name);

void *next_of(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

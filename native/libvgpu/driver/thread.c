#include "thread.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>

#include "next_symbol.h"

#define STACK_MAX_BYTES (256u << 20)

typedef size_t (*minimum_fn)(const pthread_attr_t *attributes);

/*
 * Returns the part of a stack that glibc uses for itself and for thread-local storage: glibc's own figure, or 0 if it
 * exports none.
 */
static size_t overhead_bytes(const pthread_attr_t *attributes)
{
    minimum_fn minimum = (minimum_fn)(uintptr_t)vgpu_libc_dlsym()(RTLD_DEFAULT, "__pthread_get_minstack");
    return minimum != NULL ? minimum(attributes) : 0;
}

/*
 * Starts a thread with this stack. Returns 0 or an errno. EINVAL: the stack is too small for the C library's own data.
 */
static int start_with(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread)
{
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    error = pthread_attr_setstacksize(&attributes, stack_bytes + overhead_bytes(&attributes));
    if (error == 0)
        error = pthread_create(thread, &attributes, body, argument);
    pthread_attr_destroy(&attributes);
    return error;
}

bool vgpu_thread_start(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread)
{
    sigset_t all;
    sigset_t before;
    pthread_t own;
    int error = EINVAL;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; error == EINVAL && stack_bytes <= STACK_MAX_BYTES; stack_bytes *= 4)
        error = start_with(body, argument, stack_bytes, thread != NULL ? thread : &own);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0 && thread == NULL)
        pthread_detach(own);
    return error == 0;
}

typedef int (*register_fn)(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *object);
typedef int (*atfork_fn)(void (*prepare)(void), void (*parent)(void), void (*child)(void));

bool vgpu_thread_at_fork(void (*child)(void))
{
    vgpu_dlsym_fn look_up = vgpu_libc_dlsym();
    register_fn glibc = (register_fn)(uintptr_t)look_up(RTLD_DEFAULT, "__register_atfork");
    if (glibc != NULL)
        return glibc(NULL, NULL, child, NULL) == 0;
    atfork_fn other = (atfork_fn)(uintptr_t)look_up(RTLD_DEFAULT, "pthread_atfork");
    return other != NULL && other(NULL, NULL, child) == 0;
}

int vgpu_thread_keep(void)
{
    int before = PTHREAD_CANCEL_ENABLE;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

void vgpu_thread_release(int before)
{
    int ignored;
    pthread_setcancelstate(before, &ignored);
}

/*
 * hostbuf.c: the threads that touch the pages of a new host buffer (residency/hostbuf.h), with functions in place of the
 * driver's. Each touches a part, because a single thread takes longer than the registration. Exit status 0: all passed.
 */
#include "hostbuf.h"

#include <stdio.h>
#include <unistd.h>

#include "functions.h"
#include "thread.h"

#define SMALL_BYTES (32ull << 20) /* the smallest buffer */
#define MOST_HELPERS 8

struct part {
    char *base;
    uint64_t bytes;
};

void *vgpu_reals[VGPU_FUNCTIONS];
static struct part parts[MOST_HELPERS];
static unsigned threads;

static CUresult succeed(void)
{
    return CUDA_SUCCESS;
}

void *vgpu_real_found(enum vgpu_function_id id)
{
    (void)id;
    return (void *)succeed;
}

bool vgpu_thread_start(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread)
{
    (void)stack_bytes;
    parts[threads++] = *(const struct part *)argument;
    return pthread_create(thread, NULL, body, argument) == 0;
}

int main(void)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned helpers = processors < MOST_HELPERS ? (unsigned)processors : MOST_HELPERS;
    if (vgpu_hostbuf_grow(SMALL_BYTES) != CUDA_SUCCESS || vgpu_hostbuf_bytes() != SMALL_BYTES || threads + 1 != helpers)
        return 1;
    uint64_t left = SMALL_BYTES;
    for (unsigned i = 0; i < threads; i++) {
        if (parts[i].bytes == 0 || parts[i].bytes > SMALL_BYTES / helpers)
            return 2;
        left -= parts[i].bytes;
    }
    if (left > SMALL_BYTES / helpers + helpers * VGPU_HOSTBUF_PAGE_BYTES) /* the part of the calling thread */
        return 3;
    return puts("ok") < 0;
}

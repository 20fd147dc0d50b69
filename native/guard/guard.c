/*
 * Runs cuInit under guard: the same control daemon must accept connections before and after the driver's own cuInit.
 * Then it also ran in between, when the driver connected. If a daemon started or ended meanwhile, this process may be
 * without MPS, and each further cuInit in it is refused.
 */
#include "guard.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PIPE "CUDA_MPS_PIPE_DIRECTORY"

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t g_pid; /* the process that g_admitted and g_refused are about: a forked child is judged anew */
static bool g_admitted;
static int g_refused;

/*
 * Returns the folder of MPS's pipes: the value of CUDA_MPS_PIPE_DIRECTORY. If that is not set, as after `env -i` or in a
 * login shell, it is a constant path in a container, and the driver's default elsewhere.
 */
static const char *pipe_folder(void)
{
    const char *named = getenv(PIPE);
    if (access(GUARD_CONTAINER_PIPE, F_OK) == 0) {
        if (named == NULL)
            setenv(PIPE, GUARD_CONTAINER_PIPE, 1);
        return named == NULL ? GUARD_CONTAINER_PIPE : named;
    }
    return named == NULL ? "/tmp/nvidia-mps" : named; /* the folder in which the driver looks by default */
}

static int refuse(int code, const char *pipe)
{
    if (code == GUARD_NO_CONNECTION)
        fprintf(stderr,
                "vgpu: no MPS control daemon answers in %s, and without it this process would have no "
                "limit: CUDA error 805\n",
                pipe);
    else
        fprintf(stderr, "vgpu: the other processes of this tenant hold all of its share: CUDA error %d\n", code);
    return code;
}

static int first_init(guard_init_fn real, unsigned flags)
{
    struct guard_life before, after;
    const char *pipe = pipe_folder();
    int code = guard_admit();
    if (code != GUARD_SUCCESS)
        return refuse(code, pipe);
    if (!guard_probe(pipe, &before)) {
        guard_leave();
        return refuse(GUARD_NO_CONNECTION, pipe);
    }
    code = real(flags);
    if (code != GUARD_SUCCESS) {
        guard_leave();
        return code;
    }
    if (!guard_probe(pipe, &after) || !guard_same_life(&before, &after))
        return g_refused = refuse(GUARD_NO_CONNECTION, pipe);
    g_admitted = true;
    return code;
}

int guard_init(guard_init_fn real, unsigned flags)
{
    pthread_mutex_lock(&g_lock);
    if (g_pid != getpid()) {
        g_pid = getpid();
        g_admitted = false;
        g_refused = 0;
    }
    int code = g_refused;
    if (code == 0)
        code = g_admitted ? real(flags) : first_init(real, flags);
    pthread_mutex_unlock(&g_lock);
    return code;
}

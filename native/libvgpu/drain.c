#include "drain.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#include "functions.h"

#define STACK_BYTES (128 * 1024)

static struct job {
    CUcontext context;
    uint64_t asked;
    uint64_t done;
} jobs[VGPU_CONTEXTS_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static bool started;

void vgpu_drain_thread_reset(void)
{
    memset(jobs, 0, sizeof(jobs));
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&news, NULL);
    started = false;
}

static struct job *job_of(CUcontext context)
{
    struct job *spare = NULL;
    for (unsigned i = 0; i < VGPU_CONTEXTS_MAX; i++) {
        if (jobs[i].context == context)
            return &jobs[i];
        if (jobs[i].asked == jobs[i].done)
            spare = &jobs[i];
    }
    if (spare != NULL)
        *spare = (struct job){.context = context};
    return spare;
}

static struct job *next_job(void)
{
    for (unsigned i = 0; i < VGPU_CONTEXTS_MAX; i++)
        if (jobs[i].asked != jobs[i].done)
            return &jobs[i];
    return NULL;
}

static void *serve(void *unused)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)unused;
    CALL(cuThreadExchangeStreamCaptureMode, &mode);
    pthread_mutex_lock(&lock);
    for (;;) {
        CUcontext popped;
        struct job *job = next_job();
        if (job == NULL) {
            pthread_cond_wait(&news, &lock);
            continue;
        }
        uint64_t asked = job->asked;
        CUcontext context = job->context;
        pthread_mutex_unlock(&lock);
        if (CALL(cuCtxPushCurrent_v2, context) == CUDA_SUCCESS) {
            CALL(cuCtxSynchronize);
            CALL(cuCtxPopCurrent_v2, &popped);
        }
        pthread_mutex_lock(&lock);
        if (job->context == context)
            job->done = asked;
    }
    return NULL;
}

static void start(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    started = pthread_create(&thread, &attributes, serve, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void vgpu_drain_thread_ask(CUcontext context)
{
    pthread_mutex_lock(&lock);
    if (!started)
        start();
    struct job *job = started ? job_of(context) : NULL;
    if (job != NULL) {
        job->asked++;
        pthread_cond_signal(&news);
    }
    pthread_mutex_unlock(&lock);
}

bool vgpu_drain_thread_done(CUcontext context)
{
    bool done = true;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < VGPU_CONTEXTS_MAX; i++)
        if (jobs[i].context == context)
            done = jobs[i].done == jobs[i].asked;
    pthread_mutex_unlock(&lock);
    return done;
}

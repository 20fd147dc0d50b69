#include "drain.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "capture.h"
#include "functions.h"
#include "thread.h"
#include "in_child.h"

#define STACK_BYTES (128 * 1024)

static struct vgpu_drain_job *jobs;
/* the job in whose context the drain thread makes a call now; NULL: it makes none */
static const struct vgpu_drain_job *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static pthread_cond_t out = PTHREAD_COND_INITIALIZER; /* signalled when `current` changes */
static bool started;

static void reset(void)
{
    jobs = NULL;
    current = NULL;
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&news, NULL);
    pthread_cond_init(&out, NULL);
    started = false;
}
VGPU_IN_CHILD(reset);

static struct vgpu_drain_job *next_job(void)
{
    for (struct vgpu_drain_job *job = jobs; job != NULL; job = job->next)
        if (job->asked != job->done)
            return job;
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
        struct vgpu_drain_job *job = next_job();
        if (job == NULL) {
            pthread_cond_wait(&news, &lock);
            continue;
        }
        uint64_t asked = job->asked;
        CUcontext context = job->context;
        current = job;
        pthread_mutex_unlock(&lock);
        if (CALL(cuCtxPushCurrent_v2, context) == CUDA_SUCCESS) {
            if (vgpu_capture_forbid()) {
                CALL(cuCtxSynchronize);
                vgpu_capture_allow();
            }
            CALL(cuCtxPopCurrent_v2, &popped);
        }
        pthread_mutex_lock(&lock);
        job->done = asked;
        current = NULL;
        pthread_cond_broadcast(&out);
    }
    return NULL;
}

bool vgpu_drain_thread_ask(struct vgpu_drain_job *job, CUcontext context)
{
    pthread_mutex_lock(&lock);
    if (!started)
        started = vgpu_thread_start(serve, NULL, STACK_BYTES, NULL);
    bool asked = started;
    if (asked) {
        if (job->context == NULL) {
            job->context = context;
            job->next = jobs;
            jobs = job;
        }
        job->asked++;
        pthread_cond_signal(&news);
    }
    pthread_mutex_unlock(&lock);
    return asked;
}

bool vgpu_drain_thread_done(const struct vgpu_drain_job *job)
{
    pthread_mutex_lock(&lock);
    bool done = job->done == job->asked;
    pthread_mutex_unlock(&lock);
    return done;
}

void vgpu_drain_thread_forget(struct vgpu_drain_job *job)
{
    pthread_mutex_lock(&lock);
    for (struct vgpu_drain_job **link = &jobs; *link != NULL; link = &(*link)->next)
        if (*link == job) {
            *link = job->next;
            break;
        }
    while (current == job)
        pthread_cond_wait(&out, &lock);
    job->context = NULL;
    pthread_mutex_unlock(&lock);
}

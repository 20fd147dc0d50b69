#include "aside.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 200000 /* interval between two checks of a thread */
#define SLEEPS 2       /* number of consecutive checks that must find the thread asleep */
#define BUCKETS 64     /* number of buckets into which tenants are hashed */
#define NS_PER_S 1000000000

/* A call that runs on another thread. The caller or that thread frees it, whichever finishes later. */
struct call {
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool ended;
    bool left; /* the event loop no longer waits for the call */
    pid_t thread;
    int *alone;
    uint64_t took_ns;
    void (*work)(void *data);
    _Alignas(max_align_t) unsigned char data[ASIDE_DATA_BYTES];
};

static int alone[BUCKETS]; /* for each bucket of tenants: number of abandoned threads; atomic */

static uint64_t ns_of(clockid_t clock)
{
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static void call_free(struct call *call)
{
    pthread_mutex_destroy(&call->lock);
    pthread_cond_destroy(&call->news);
    free(call);
}

static void *run(void *argument)
{
    struct call *call = argument;
    __atomic_store_n(&call->thread, (pid_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    uint64_t before = ns_of(CLOCK_THREAD_CPUTIME_ID);
    call->work(call->data);
    call->took_ns = ns_of(CLOCK_THREAD_CPUTIME_ID) - before;
    pthread_mutex_lock(&call->lock);
    bool last = call->left;
    int *counted = call->alone;
    call->ended = true;
    pthread_cond_signal(&call->news);
    pthread_mutex_unlock(&call->lock);
    if (last) {
        call_free(call);
        __atomic_sub_fetch(counted, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static bool start(struct call *call, pthread_t *thread)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(thread, NULL, run, call) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* Returns whether the thread of this call neither runs on a processor nor waits for one (proc(5), /proc/PID/stat). */
static bool sleeps(const struct call *call)
{
    char text[256];
    pid_t thread = __atomic_load_n(&call->thread, __ATOMIC_ACQUIRE);
    snprintf(text, sizeof(text), "/proc/self/task/%d/stat", (int)thread);
    int fd = thread > 0 ? open(text, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    ssize_t size = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[size > 0 ? size : 0] = '\0';
    const char *name_end = strrchr(text, ')');
    return name_end != NULL && (strncmp(name_end, ") S", 3) == 0 || strncmp(name_end, ") D", 3) == 0);
}

static bool waited_for(struct call *call, pthread_t thread)
{
    clockid_t clock;
    int asleep = 0;
    pthread_mutex_lock(&call->lock);
    bool known = call->ended || pthread_getcpuclockid(thread, &clock) == 0;
    while (!call->ended && asleep < SLEEPS && (!known || ns_of(clock) <= ASIDE_MAX_NS)) {
        uint64_t until = ns_of(CLOCK_MONOTONIC) + LOOK_NS;
        struct timespec at = {.tv_sec = (time_t)(until / NS_PER_S), .tv_nsec = (long)(until % NS_PER_S)};
        if (pthread_cond_timedwait(&call->news, &call->lock, &at) != 0)
            asleep = sleeps(call) ? asleep + 1 : 0;
    }
    bool ended = call->ended;
    call->left = !ended;
    if (!ended)
        __atomic_add_fetch(call->alone, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&call->lock);
    return ended;
}

static struct call *call_make(void (*work)(void *data), const void *data, size_t size)
{
    pthread_condattr_t monotonic;
    struct call *call = calloc(1, sizeof(*call));
    if (call == NULL)
        return NULL;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&call->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&call->lock, NULL);
    call->work = work;
    memcpy(call->data, data, size);
    return call;
}

static int *alone_of(uint64_t tenant)
{
    const uint64_t spread = 0x9e3779b97f4a7c15u; /* 2^64 divided by the golden ratio: neighbours get distant buckets */
    return &alone[tenant * spread >> 32 & (BUCKETS - 1)];
}

enum aside aside(uint64_t tenant, void (*work)(void *data), void *data, size_t size, uint64_t *took_ns)
{
    pthread_t thread;
    *took_ns = ASIDE_MAX_NS + 1;
    if (__atomic_load_n(alone_of(tenant), __ATOMIC_RELAXED) >= ASIDE_ALONE_MAX)
        return ASIDE_NOT_BEGUN;
    struct call *call = call_make(work, data, size);
    if (call == NULL)
        return ASIDE_NOT_BEGUN;
    call->alone = alone_of(tenant);
    if (!start(call, &thread)) {
        call_free(call);
        return ASIDE_NOT_BEGUN;
    }
    bool ended = waited_for(call, thread);
    pthread_detach(thread);
    if (!ended)
        return ASIDE_GOES_ON;
    *took_ns = call->took_ns;
    memcpy(data, call->data, size);
    call_free(call);
    return ASIDE_DONE;
}

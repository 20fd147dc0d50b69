#include "aside.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 200000 /* interval between two checks of a thread */
#define SLEEPS 2       /* number of consecutive checks that must find a thread asleep before it is abandoned */
#define NS_PER_S 1000000000

/* A call that runs on another thread. The waiting caller or that thread frees this record, whichever finishes later. */
struct call {
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool ended;
    bool left; /* the event loop no longer waits for the call */
    pid_t thread;
    uint64_t tenant;
    uint64_t took_ns;
    void (*work)(void *data);
    _Alignas(max_align_t) unsigned char data[ASIDE_DATA_BYTES];
};

/* Threads of one tenant that have not ended. */
struct threads {
    uint64_t tenant;
    uint32_t count; /* 0: the entry is free */
};

static pthread_mutex_t running_lock = PTHREAD_MUTEX_INITIALIZER;
static struct threads *running; /* an array; running_lock guards it and its size, which only increases */
static size_t running_size;

/* Returns the tenant's entry, else a free one, else NULL. */
static struct threads *entry_of(uint64_t tenant)
{
    struct threads *vacant = NULL;
    for (size_t i = 0; i < running_size; i++) {
        if (running[i].count > 0 && running[i].tenant == tenant)
            return &running[i];
        if (running[i].count == 0)
            vacant = &running[i];
    }
    return vacant;
}

static struct threads *entry_made(void)
{
    struct threads *grown = realloc(running, (running_size + 1) * sizeof(*running));
    if (grown == NULL)
        return NULL;
    running = grown;
    running[running_size] = (struct threads){0};
    return &running[running_size++];
}

/* Counts a thread of this tenant that begins. Returns false if the tenant has too many, or there is no memory. */
static bool count_in(uint64_t tenant)
{
    pthread_mutex_lock(&running_lock);
    struct threads *entry = entry_of(tenant);
    if (entry == NULL)
        entry = entry_made();
    bool room = entry != NULL && entry->count < ASIDE_ALONE_MAX;
    if (room) {
        entry->tenant = tenant;
        entry->count++;
    }
    pthread_mutex_unlock(&running_lock);
    return room;
}

static void count_out(uint64_t tenant)
{
    pthread_mutex_lock(&running_lock);
    entry_of(tenant)->count--;
    pthread_mutex_unlock(&running_lock);
}

static uint64_t ns_of(clockid_t clock)
{
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static void call_end(struct call *call)
{
    count_out(call->tenant);
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
    call->ended = true;
    pthread_cond_signal(&call->news);
    pthread_mutex_unlock(&call->lock);
    if (last)
        call_end(call);
    return NULL;
}

/*
 * Starts the call's thread on the processor of the event loop, which then waits; if that fails, on any processor. On
 * another processor the thread could wait for a process that the kernel does not preempt while it ends (measured: 4 ms
 * and more).
 */
static bool start(struct call *call, pthread_t *thread)
{
    sigset_t all;
    sigset_t before;
    cpu_set_t processor;
    pthread_attr_t here;
    sigfillset(&all);
    CPU_ZERO(&processor);
    CPU_SET((size_t)sched_getcpu(), &processor);
    pthread_attr_init(&here);
    pthread_attr_setaffinity_np(&here, sizeof(processor), &processor);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(thread, &here, run, call) == 0 || pthread_create(thread, NULL, run, call) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&here);
    return started;
}

/* Lets an abandoned thread run on every processor of the event loop. */
static void spread(pthread_t thread)
{
    cpu_set_t processors;
    if (pthread_getaffinity_np(pthread_self(), sizeof(processors), &processors) == 0)
        pthread_setaffinity_np(thread, sizeof(processors), &processors);
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
        if (pthread_cond_timedwait(&call->news, &call->lock, &at) == 0)
            continue;
        /* without the lock, for which a thread whose work is done would sleep */
        pthread_mutex_unlock(&call->lock);
        asleep = sleeps(call) ? asleep + 1 : 0;
        pthread_mutex_lock(&call->lock);
    }
    bool ended = call->ended;
    call->left = !ended;
    pthread_mutex_unlock(&call->lock);
    return ended;
}

static struct call *call_make(uint64_t tenant, void (*work)(void *data), const void *data, size_t size)
{
    pthread_condattr_t monotonic;
    struct call *call = calloc(1, sizeof(*call));
    if (call == NULL || !count_in(tenant)) {
        free(call);
        return NULL;
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&call->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&call->lock, NULL);
    call->tenant = tenant;
    call->work = work;
    memcpy(call->data, data, size);
    return call;
}

enum aside aside(uint64_t tenant, void (*work)(void *data), void *data, size_t size, uint64_t *took_ns)
{
    pthread_t thread;
    *took_ns = ASIDE_MAX_NS + 1;
    struct call *call = call_make(tenant, work, data, size);
    if (call == NULL)
        return ASIDE_NOT_BEGUN;
    if (!start(call, &thread)) {
        call_end(call);
        return ASIDE_NOT_BEGUN;
    }
    bool ended = waited_for(call, thread);
    if (!ended)
        spread(thread);
    pthread_detach(thread);
    if (!ended)
        return ASIDE_GOES_ON;
    *took_ns = call->took_ns;
    memcpy(data, call->data, size);
    call_end(call);
    return ASIDE_DONE;
}

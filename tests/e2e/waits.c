/*
 * waits.c: threads that use the device and then wait for ever for locks, pipes and other objects of the program. None
 * waits in the driver, but their stacks still hold return addresses of the driver. Each line of input starts one more
 * thread, which allocates. Needs no cuda.h: cc waits.c -ldl -lpthread.
 */
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { CALLS = 4, WAITS = 10, ROUNDS = 6, SIZE = 4096 };

typedef int call(); /* accepts as many arguments as each driver function has */

static void *driver, *context;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, own = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
static sem_t none;
static atomic_int ready;
static pthread_t forever;
static int ends[2];

static call *named(const char *name)
{
    return (call *)dlsym(driver, name);
}

/* inlined into the caller, so that the driver's return addresses stay in the stack region that the later wait uses */
static inline __attribute__((always_inline)) void work(long kind)
{
    uint64_t memory = 0;
    char back[SIZE];
    void *event = NULL;
    named("cuCtxSetCurrent")(context);
    named("cuMemAlloc_v2")(&memory, (size_t)SIZE);
    named("cuMemsetD8_v2")(memory, 7, (size_t)SIZE);
    named("cuEventCreate")(&event, 0);
    named("cuEventRecord")(event, NULL);
    named("cuEventSynchronize")(event);
    if (kind % CALLS == 1)
        named("cuMemcpyDtoH_v2")(back, memory, (size_t)SIZE);
    if (kind % CALLS == 2)
        named("cuCtxSynchronize")();
    if (kind % CALLS == 3)
        named("cuMemFree_v2")(memory);
}

static inline __attribute__((always_inline)) void wait_for(long kind)
{
    char byte;
    struct pollfd end = {.fd = ends[0], .events = POLLIN};
    switch (kind % WAITS) {
    case 0:
        pthread_mutex_lock(&mutex);
        break;
    case 1:
    case 2: /* a mutex like these two: the driver's own lock is of this kind */
    case 3:
        pthread_rwlock_rdlock(&rwlock);
        break;
    case 4:
        pthread_rwlock_wrlock(&rwlock);
        break;
    case 5:
        sem_wait(&none);
        break;
    case 6:
        pthread_mutex_lock(&own);
        pthread_cond_wait(&never, &own);
        break;
    case 7:
        poll(&end, 1, -1);
        break;
    case 8:
        if (read(ends[0], &byte, 1) < 0)
            perror("read");
        break;
    default:
        pthread_join(forever, NULL);
    }
}

static void *wait_after_work(void *kind)
{
    work((long)kind);
    atomic_fetch_add(&ready, 1);
    wait_for((long)kind / CALLS);
    return NULL;
}

static void *sleep_on(void *nothing)
{
    for (;;)
        pause();
    return nothing;
}

static void *allocate(void *nothing)
{
    uint64_t memory = 0;
    named("cuCtxSetCurrent")(context);
    printf("{\"code\": %d}\n", named("cuMemAlloc_v2")(&memory, (size_t)SIZE));
    fflush(stdout);
    return nothing;
}

int main(void)
{
    pthread_t thread;
    char line[64];
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL || named("cuInit")(0) != 0 || named("cuDevicePrimaryCtxRetain")(&context, 0) != 0)
        return 1;
    sem_init(&none, 0, 0);
    pthread_mutex_lock(&mutex);
    pthread_rwlock_wrlock(&rwlock);
    if (pipe(ends) != 0 || pthread_create(&forever, NULL, sleep_on, NULL) != 0)
        return 1;
    for (long kind = 0; kind < ROUNDS * WAITS; kind++)
        if (pthread_create(&thread, NULL, wait_after_work, (void *)kind) != 0)
            return 1;
    while (atomic_load(&ready) < ROUNDS * WAITS)
        usleep(1000);
    printf("{\"waits\": %d}\n", ROUNDS * WAITS);
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL)
        if (pthread_create(&thread, NULL, allocate, NULL) != 0)
            return 1;
    _exit(0);
}

/* The gate of a process: while another process holds it suspended (checkpoint.c), its driver calls wait here. */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

bool sim_gate_shut(const struct sim_proc *p)
{
    enum sim_gate gate = sim_gate_of(atomic_load_explicit(&p->gate, memory_order_acquire));
    return gate == SIM_LOCKED || gate == SIM_CHECKPOINTED;
}

/*
 * In a suspended process, a thread that calls the driver waits for a pthread_rwlock without a timeout, in private
 * memory, as with NVIDIA's driver 580. A thread of the simulated driver holds the lock while the gate is shut.
 */
static pthread_rwlock_t g_calls = PTHREAD_RWLOCK_INITIALIZER;
static pthread_mutex_t g_keeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_kept = PTHREAD_COND_INITIALIZER;
static enum { KEPT_BY_NOBODY, KEEPER_COMES, KEPT_BY_KEEPER, KEEPER_GOES } g_keeper;

static void gate_sleep(struct sim_proc *p)
{
    uint32_t seen = atomic_load(&p->gate);
    /* the sleep has a timeout, because the process that changes the gate may die before it wakes the waiters */
    struct timespec t = {0, 50000000};
    if (sim_gate_of(seen) != SIM_RUNNING)
        syscall(SYS_futex, &p->gate, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void keeper_is(int now)
{
    pthread_mutex_lock(&g_keeping);
    g_keeper = now;
    pthread_cond_broadcast(&g_kept);
    pthread_mutex_unlock(&g_keeping);
}

static void *keep_shut(void *proc)
{
    pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
    pthread_rwlock_wrlock(&g_calls);
    keeper_is(KEPT_BY_KEEPER);
    while (sim_gate_shut(proc))
        gate_sleep(proc);
    keeper_is(KEEPER_GOES);
    pthread_rwlock_unlock(&g_calls);
    keeper_is(KEPT_BY_NOBODY);
    return NULL;
}

static bool start_keeper(struct sim_proc *p)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, keep_shut, p) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}

/* Returns true if a driver thread holds g_calls; false if no thread could be started. */
static bool is_kept(struct sim_proc *p)
{
    pthread_mutex_lock(&g_keeping);
    while (g_keeper == KEEPER_COMES || g_keeper == KEEPER_GOES)
        pthread_cond_wait(&g_kept, &g_keeping);
    if (g_keeper == KEPT_BY_NOBODY && start_keeper(p)) {
        g_keeper = KEEPER_COMES;
        while (g_keeper == KEEPER_COMES)
            pthread_cond_wait(&g_kept, &g_keeping);
    }
    bool kept = g_keeper != KEPT_BY_NOBODY;
    pthread_mutex_unlock(&g_keeping);
    return kept;
}

void sim_gate_wait(struct sim_proc *p)
{
    while (sim_gate_shut(p)) {
        if (!is_kept(p)) {
            gate_sleep(p);
            continue;
        }
        pthread_rwlock_rdlock(&g_calls);
        pthread_rwlock_unlock(&g_calls);
    }
}

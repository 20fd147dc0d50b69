/*
 * arbiter_turns.c: how long one turn of the arbiter's loop may be. Exit status 0: all passed.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "aside.h"
#include "looks.h"
#include "process.h"

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                       \
        }                                                                   \
    } while (0)

#define LOOKS 50

static struct lease leases[2];
static int looks; /* looks that were made */
static int seen;  /* the number of queries made when the last message arrived */

static bool look_at_one(struct lease *lease)
{
    (void)lease;
    looks++;
    return looks < LOOKS;
}

/* A source that always has a message. */
static void message(struct source *source, uint32_t events)
{
    (void)source;
    (void)events;
    CHECK(looks <= seen + 1);
    seen = looks;
    if (looks < LOOKS)
        return;
    puts("ok");
    fflush(stdout);
    _exit(0);
}

/* Processors as bits. (<sched.h> and sched_state.h define the same name.) */
struct processors {
    uint64_t bits[128];
};

static struct processors processors_of(pid_t thread)
{
    struct processors found = {0};
    CHECK(syscall(SYS_sched_getaffinity, thread, sizeof(found), &found) > 0);
    return found;
}

static int count(const struct processors *processors)
{
    int sum = 0;
    for (size_t i = 0; i < sizeof(processors->bits) / sizeof(processors->bits[0]); i++)
        sum += __builtin_popcountll(processors->bits[i]);
    return sum;
}

struct thread {
    int release_fd; /* the thread sleeps until this pipe has a byte; -1: it does not sleep */
    int told_fd;
    int processors; /* the number of processors on which the thread may run */
};

static void run(void *data)
{
    struct thread *thread = data;
    pid_t id = (pid_t)syscall(SYS_gettid);
    char byte;
    struct processors own = processors_of(0);
    thread->processors = count(&own);
    if (thread->release_fd < 0)
        return;
    CHECK(write(thread->told_fd, &id, sizeof(id)) == sizeof(id));
    (void)!read(thread->release_fd, &byte, 1);
}

static void test_a_thread_begins_on_the_processor_of_the_loop(void)
{
    struct thread thread = {.release_fd = -1};
    uint64_t took_ns;
    while (aside(1, run, &thread, sizeof(thread), &took_ns) != ASIDE_DONE)
        ; /* a busy machine may let the thread sleep in a page fault */
    CHECK(thread.processors == 1);
}

static void test_an_abandoned_thread_may_use_every_processor(void)
{
    int release[2];
    int told[2];
    uint64_t took_ns;
    pid_t id;
    CHECK(pipe(release) == 0 && pipe(told) == 0);
    struct thread thread = {.release_fd = release[0], .told_fd = told[1]};
    CHECK(aside(1, run, &thread, sizeof(thread), &took_ns) == ASIDE_GOES_ON);
    CHECK(read(told[0], &id, sizeof(id)) == sizeof(id));
    struct processors own = processors_of(0);
    struct processors now = processors_of(id);
    CHECK(memcmp(&own, &now, sizeof(own)) == 0);
    close(release[1]);
}

static void test_abandoned_threads_of_a_tenant_leave_room_for_every_other_tenant(void)
{
    int release[2];
    int told[2];
    uint64_t took_ns;
    struct thread quick = {.release_fd = -1};
    CHECK(pipe(release) == 0 && pipe(told) == 0);
    struct thread slow = {.release_fd = release[0], .told_fd = told[1]};
    for (int i = 0; i < ASIDE_ALONE_MAX; i++)
        CHECK(aside(7, run, &slow, sizeof(slow), &took_ns) == ASIDE_GOES_ON);
    CHECK(aside(7, run, &quick, sizeof(quick), &took_ns) == ASIDE_NOT_BEGUN);
    for (uint64_t tenant = 100; tenant < 400; tenant++)
        CHECK(aside(tenant, run, &quick, sizeof(quick), &took_ns) != ASIDE_NOT_BEGUN);
    close(release[1]);
    while (aside(7, run, &quick, sizeof(quick), &took_ns) == ASIDE_NOT_BEGUN)
        usleep(1000); /* the threads end now */
}

static void destroy(struct source *source)
{
    free(source);
}

static void add_ended(struct lease *lease, uint32_t slot)
{
    struct process *process = calloc(1, sizeof(*process));
    *process = (struct process){.pidfd = {.fd = open("/dev/null", O_RDONLY), .slow = true, .destroy = destroy},
                                .lease = lease,
                                .next = lease->processes,
                                .slot = slot,
                                .due = PROCESS_ENDED};
    lease->processes = process;
}

static int processes(const struct lease *lease)
{
    int sum = 0;
    for (const struct process *p = lease->processes; p != NULL; p = p->next)
        sum++;
    return sum;
}

static void test_a_look_at_a_lease_looks_at_one_process(void)
{
    static struct lease lease = {.holds = 100, .watch = -1};
    lease.usage_fd = memfd_create("usage", 0);
    CHECK(lease.usage_fd >= 0 && ftruncate(lease.usage_fd, VGPU_USAGE_FILE_BYTES) == 0);
    for (uint32_t slot = 0; slot < 5; slot++)
        add_ended(&lease, slot);
    for (int remaining = 4; remaining >= 0; remaining--) {
        CHECK(process_look_at_one(&lease));
        CHECK(processes(&lease) == remaining);
    }
    CHECK(!process_look_at_one(&lease));
}

/* Does not return. */
static void test_a_message_waits_for_one_look_at_most(void)
{
    static struct source source = {.ready = message};
    int always[2];
    CHECK(pipe(always) == 0 && write(always[1], "x", 1) == 1);
    source.fd = always[0];
    CHECK(loop_open() == 0 && looks_open(look_at_one) == 0 && loop_add(&source, EPOLLIN) == 0);
    looks_add(&leases[0]);
    looks_add(&leases[1]);
    loop_run();
}

int main(void)
{
    test_a_thread_begins_on_the_processor_of_the_loop();
    test_an_abandoned_thread_may_use_every_processor();
    test_abandoned_threads_of_a_tenant_leave_room_for_every_other_tenant();
    test_a_look_at_a_lease_looks_at_one_process();
    test_a_message_waits_for_one_look_at_most();
    return 1;
}

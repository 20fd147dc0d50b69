/* unit.c: tests of the pure native parts with threads and forked processes. Exit status 0: all passed. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "account.h"
#include "lease_limits.h"
#include "pause.h"
#include "slot.h"
#include "table.h"

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                       \
        }                                                                   \
    } while (0)

#define THREADS 8
#define LIMIT 1000u

static struct vgpu_usage *usage;
static struct vgpu_account accounts[THREADS];
/* bytes that all threads hold: reduced before a release and increased after a reservation, so never above the truth */
static uint64_t granted_total;

static void fresh_usage(void)
{
    memset(usage, 0, sizeof(*usage));
    usage->slot_high = THREADS;
    for (uint32_t i = 0; i < THREADS; i++) {
        accounts[i].usage = usage;
        accounts[i].slot = i;
        pthread_mutex_init(&accounts[i].slow, NULL);
    }
}

static void *race(void *argument)
{
    struct vgpu_account *account = argument;
    unsigned seed = account->slot + 1;
    uint64_t held = 0;
    for (int i = 0; i < 4000; i++) {
        uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % 300;
        if (held > 0 && rand_r(&seed) % 2 == 0) {
            __atomic_fetch_sub(&granted_total, held, __ATOMIC_SEQ_CST);
            vgpu_account_release(account, 0, held);
            held = 0;
        } else if (vgpu_account_reserve(account, 0, bytes, LIMIT)) {
            CHECK(__atomic_add_fetch(&granted_total, bytes, __ATOMIC_SEQ_CST) <= LIMIT);
            /* sometimes the driver allocates less than was reserved */
            uint64_t kept = rand_r(&seed) % 4 == 0 ? bytes / 2 : bytes;
            __atomic_fetch_sub(&granted_total, bytes - kept, __ATOMIC_SEQ_CST);
            vgpu_account_settle(account, 0, bytes, kept);
            held += kept;
        }
    }
    __atomic_fetch_sub(&granted_total, held, __ATOMIC_SEQ_CST);
    vgpu_account_release(account, 0, held);
    return NULL;
}

static void on_threads(void *(*body)(void *), int shared_account)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, body, &accounts[shared_account ? 0 : i]) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

static void test_never_over_the_limit(void)
{
    for (int shared = 0; shared < 2; shared++) {
        fresh_usage();
        on_threads(race, shared);
        CHECK(vgpu_account_sum(usage, 0) == 0 && granted_total == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(usage->slots[i].devices[0].claim_bytes == 0);
    }
}

static pthread_barrier_t barrier;
static int winners;

static void *want_most(void *argument)
{
    pthread_barrier_wait(&barrier);
    if (!vgpu_account_reserve(argument, 0, 600, LIMIT))
        return NULL;
    __atomic_fetch_add(&winners, 1, __ATOMIC_SEQ_CST);
    vgpu_account_settle(argument, 0, 600, 600);
    return NULL;
}

/* Several requests race. Each fits alone, and exactly one of them is granted. */
static void test_one_of_many_wins(void)
{
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int round = 0; round < 200; round++) {
        fresh_usage();
        winners = 0;
        on_threads(want_most, 0);
        CHECK(winners == 1);
        CHECK(vgpu_account_sum(usage, 0) == 600);
    }
}

/* After 50 ms ends a claim whose bytes are already counted as used. */
static void *end_claim(void *unused)
{
    (void)unused;
    vgpu_pause_ns(50000000);
    vgpu_account_settle(&accounts[1], 0, 500, 0);
    return NULL;
}

/* A process lost its processor between adding bytes to its use and ending their claim, so they are counted twice for a
 * while. */
static void test_a_request_waits_while_bytes_are_counted_twice(void)
{
    pthread_t thread;
    fresh_usage();
    CHECK(vgpu_account_reserve(&accounts[1], 0, 500, LIMIT));
    vgpu_account_add(&accounts[1], 0, 500);
    CHECK(pthread_create(&thread, NULL, end_claim, NULL) == 0);
    CHECK(vgpu_account_reserve(&accounts[0], 0, 400, LIMIT));
    CHECK(pthread_join(thread, NULL) == 0);
}

static void test_account_edges(void)
{
    fresh_usage();
    CHECK(vgpu_account_reserve(&accounts[0], 1, LIMIT, LIMIT));
    /* the first reservation is not settled yet, so it blocks the limit */
    CHECK(!vgpu_account_reserve(&accounts[1], 1, 1, LIMIT));
    vgpu_account_settle(&accounts[0], 1, LIMIT, LIMIT);
    CHECK(!vgpu_account_reserve(&accounts[1], 1, 1, LIMIT));
    vgpu_account_refused(&accounts[1], 1);
    CHECK(usage->slots[1].devices[1].refusals_limit == 1);
    CHECK(!vgpu_account_reserve(&accounts[1], 1, UINT64_MAX, LIMIT));
    CHECK(!vgpu_account_reserve(&accounts[1], 1, 1, 0)); /* a limit of 0, which a closed lease has */
    vgpu_account_release(&accounts[0], 1, 400);
    vgpu_account_set_context(&accounts[0], 1, 400);
    CHECK(vgpu_account_sum(usage, 1) == LIMIT && vgpu_account_settled(usage, 1) == LIMIT);
    vgpu_account_release(&accounts[0], 1, 10 * LIMIT); /* a release of more than is in use sets the use to 0 */
    CHECK(vgpu_account_sum(usage, 1) == 400);
    vgpu_account_set_context(&accounts[0], 1, 0);
    CHECK(vgpu_account_sum(usage, 1) == 0 && usage->slots[0].devices[1].peak_bytes == LIMIT);
    /* a tenant has overwritten the page: requests are refused, and the sum does not wrap */
    usage->slots[3].devices[1].used_bytes = UINT64_MAX;
    usage->slots[4].devices[1].used_bytes = UINT64_MAX;
    usage->slot_high = UINT32_MAX;
    CHECK(vgpu_account_sum(usage, 1) == UINT64_MAX);
    CHECK(!vgpu_account_reserve(&accounts[0], 1, 1, LIMIT));
}

static pid_t start_busy_child(void)
{
    pid_t child = fork();
    if (child == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0)
        for (volatile unsigned spin = 0;; spin++)
            continue;
    return child;
}

static long sleeps(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_nvcsw;
}

/*
 * Another process's claim takes all room, so a request waits for its end. Between its looks the request sleeps. If it
 * yielded instead, a busy process on its CPU would run for a time slice of the kernel after each look.
 */
static void test_a_busy_cpu_does_not_prolong_a_refusal(void)
{
    cpu_set_t before;
    cpu_set_t first;
    CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
    CPU_ZERO(&first);
    for (int cpu = 0; CPU_COUNT(&first) == 0; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &first);
    CHECK(sched_setaffinity(0, sizeof(first), &first) == 0);
    fresh_usage();
    CHECK(vgpu_account_reserve(&accounts[0], 0, LIMIT, LIMIT));
    pid_t child = start_busy_child();
    long before_it = sleeps();
    CHECK(!vgpu_account_reserve(&accounts[THREADS - 1], 0, 1, LIMIT));
    long slept = sleeps() - before_it;
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child && sched_setaffinity(0, sizeof(before), &before) == 0);
    CHECK(slept > 40); /* there are 50 long pauses */
}

static struct vgpu_limits *shared_limits;
static int writer_done;

static void store_words(const struct vgpu_limits *from)
{
    const uint64_t *words = (const uint64_t *)from;
    for (size_t i = 2; i < sizeof(*from) / 8; i++)
        __atomic_store_n((uint64_t *)shared_limits + i, words[i], __ATOMIC_SEQ_CST);
}

static struct vgpu_limits sample_limits(uint64_t bytes)
{
    struct vgpu_limits limits = {.magic = VGPU_LEASE_MAGIC,
                                 .version = VGPU_LEASE_VERSION,
                                 .generation = 2,
                                 .allocation = "a1",
                                 .state = VGPU_LEASE_OPEN,
                                 .device_count = VGPU_MAX_DEVICES};
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++) {
        strcpy(limits.devices[d].uuid, "GPU-00000000-0000-0000-0000-000000000001");
        limits.devices[d].memory_bytes = bytes;
        limits.devices[d].share = 5000;
    }
    return limits;
}

static void *write_limits(void *unused)
{
    (void)unused;
    for (uint64_t bytes = 1; bytes <= 3000; bytes++) {
        struct vgpu_limits next = sample_limits(bytes);
        __atomic_fetch_add(&shared_limits->generation, 1, __ATOMIC_SEQ_CST);
        store_words(&next);
        __atomic_fetch_add(&shared_limits->generation, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&writer_done, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void test_limits_never_torn(void)
{
    pthread_t writer;
    struct vgpu_limits copy;
    *shared_limits = sample_limits(1);
    CHECK(pthread_create(&writer, NULL, write_limits, NULL) == 0);
    while (!__atomic_load_n(&writer_done, __ATOMIC_SEQ_CST)) {
        int error = vgpu_limits_read(shared_limits, &copy);
        CHECK(error == 0 || error == -EAGAIN);
        for (unsigned d = 1; error == 0 && d < VGPU_MAX_DEVICES; d++)
            CHECK(copy.devices[d].memory_bytes == copy.devices[0].memory_bytes);
    }
    pthread_join(writer, NULL);
    shared_limits->generation |= 1; /* the state that a writer leaves if it dies while it writes */
    CHECK(vgpu_limits_read(shared_limits, &copy) == -EAGAIN);
}

static void refused_with(void (*spoil)(struct vgpu_limits *limits))
{
    struct vgpu_limits copy;
    *shared_limits = sample_limits(1);
    CHECK(vgpu_limits_read(shared_limits, &copy) == 0);
    spoil(shared_limits);
    CHECK(vgpu_limits_read(shared_limits, &copy) == -EINVAL);
}

static void spoil_magic(struct vgpu_limits *l)
{
    l->magic = 0;
}
static void spoil_version(struct vgpu_limits *l)
{
    l->version = 99;
}
static void spoil_state(struct vgpu_limits *l)
{
    l->state = 0;
}
static void spoil_count(struct vgpu_limits *l)
{
    l->device_count = VGPU_MAX_DEVICES + 1;
}
static void spoil_none(struct vgpu_limits *l)
{
    l->device_count = 0;
}
static void spoil_memory(struct vgpu_limits *l)
{
    l->devices[3].memory_bytes = 0;
}
static void spoil_huge(struct vgpu_limits *l)
{
    l->devices[3].memory_bytes = UINT64_MAX;
}
static void spoil_share(struct vgpu_limits *l)
{
    l->devices[3].share = 10001;
}
static void spoil_policy(struct vgpu_limits *l)
{
    l->devices[3].share_policy = 3;
}
static void spoil_uuid(struct vgpu_limits *l)
{
    memset(l->devices[3].uuid, 'x', VGPU_UUID_BYTES);
}
static void spoil_name(struct vgpu_limits *l)
{
    memset(l->allocation, 'x', VGPU_ID_BYTES);
}

static void test_bad_limits_are_refused(void)
{
    void (*const spoilers[])(struct vgpu_limits *) = {spoil_magic,  spoil_version, spoil_state, spoil_count,
                                                      spoil_none,   spoil_memory,  spoil_huge,  spoil_share,
                                                      spoil_policy, spoil_uuid,    spoil_name};
    for (size_t i = 0; i < sizeof(spoilers) / sizeof(spoilers[0]); i++)
        refused_with(spoilers[i]);
}

static void test_uuids(void)
{
    unsigned char bytes[16];
    CHECK(vgpu_uuid_parse("GPU-01020304-0506-0708-090a-0b0c0d0e0f10", bytes) == 0);
    for (int i = 0; i < 16; i++)
        CHECK(bytes[i] == i + 1);
    CHECK(vgpu_uuid_parse("MIG-ABCDEFab-0506-0708-090a-0b0c0d0e0f10", bytes) == 0);
    CHECK(vgpu_uuid_parse("GPU-01020304-0506-0708-090a-0b0c0d0e0f1", bytes) == -EINVAL);
    CHECK(vgpu_uuid_parse("GPU-01020304-0506-0708-090a-0b0c0d0e0f100", bytes) == -EINVAL);
    CHECK(vgpu_uuid_parse("GPU-0102030405060708090a0b0c0d0e0f10", bytes) == -EINVAL);
    CHECK(vgpu_uuid_parse("01020304-0506-0708-090a-0b0c0d0e0f10", bytes) == -EINVAL);
    CHECK(vgpu_uuid_parse("", bytes) == -EINVAL);
}

/* Compares the table with an array that has an entry for every key. */
static void test_table(void)
{
    enum { KEYS = 3000 };
    static uint64_t model[KEYS];
    unsigned seed = 7;
    struct vgpu_entry entry;
    uint64_t live = 0;
    for (int i = 0; i < 200000; i++) {
        uint64_t key = (uint64_t)rand_r(&seed) % KEYS;
        if (rand_r(&seed) % 2 == 0) {
            entry = (struct vgpu_entry){.kind = VGPU_KIND_POINTER, .key = key << 9, .bytes = (uint64_t)i + 1};
            CHECK(vgpu_table_put(&entry));
            live += model[key] == 0;
            model[key] = entry.bytes;
        } else {
            bool there = vgpu_table_take(VGPU_KIND_POINTER, key << 9, &entry);
            CHECK(there == (model[key] != 0) && (!there || entry.bytes == model[key]));
            live -= there;
            model[key] = 0;
        }
        CHECK(!vgpu_table_get(VGPU_KIND_ARRAY, key << 9, &entry));
    }
    CHECK(vgpu_table_count() == live);
}

static bool even(const struct vgpu_entry *found, void *sum)
{
    bool match = found->kind == VGPU_KIND_HANDLE && found->bytes % 2 == 0;
    if (match)
        *(uint64_t *)sum += found->bytes;
    return match;
}

static void test_table_purge(void)
{
    struct vgpu_entry entry = {.kind = VGPU_KIND_HANDLE};
    uint64_t before = vgpu_table_count();
    uint64_t sum = 0;
    for (uint64_t i = 1; i <= 1000; i++) {
        entry.key = i * 0x1000;
        entry.bytes = i;
        CHECK(vgpu_table_put(&entry));
    }
    vgpu_table_purge(even, &sum);
    CHECK(sum == 250500 && vgpu_table_count() == before + 500);
    for (uint64_t i = 1; i <= 1000; i++)
        CHECK(vgpu_table_get(VGPU_KIND_HANDLE, i * 0x1000, &entry) == (i % 2 == 1));
}

/* Small allocations are counted in the entry of their page. The entry is removed with the last of them, whatever the
 * order of frees.
 */
static void test_table_pages(void)
{
    struct vgpu_entry page;
    const uint64_t base = 77ull * VGPU_PAGE_BYTES;
    uint64_t before = vgpu_table_count();
    bool first;
    for (uint64_t i = 0; i < 1000; i++) {
        struct vgpu_entry entry = {.kind = VGPU_KIND_POINTER, .key = base + i * 512, .bytes = 512, .device = 3};
        CHECK(vgpu_table_put_in_page(&entry, &first) && first == (i == 0));
    }
    CHECK(vgpu_table_count() == before + 1001);
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t at = base + (i * 7 % 1000) * 512;
        CHECK(vgpu_table_take(VGPU_KIND_POINTER, at, &page) && page.bytes == 512);
        struct vgpu_entry entry = page;
        CHECK(vgpu_table_leave_page(&entry, &page) == (i == 999));
    }
    CHECK(page.bytes == VGPU_PAGE_BYTES && page.device == 3 && vgpu_table_count() == before);
    struct vgpu_entry gone = {.kind = VGPU_KIND_POINTER, .key = base};
    CHECK(!vgpu_table_leave_page(&gone, &page));
}

static bool is_owned_by(const struct vgpu_entry *found, void *owner)
{
    return found->owner == owner;
}

/* Small allocations of two contexts have addresses on one page. The end of one context leaves the other's entry and its
 * count. */
static void test_table_pages_of_contexts(void)
{
    static char first_context, second_context;
    const uint64_t base = 78ull * VGPU_PAGE_BYTES;
    struct vgpu_entry a = {.kind = VGPU_KIND_POINTER, .key = base, .bytes = 512, .owner = &first_context};
    struct vgpu_entry b = {.kind = VGPU_KIND_POINTER, .key = base + 512, .bytes = 512, .owner = &second_context};
    struct vgpu_entry page;
    uint64_t before = vgpu_table_count();
    bool first;
    CHECK(vgpu_table_put_in_page(&a, &first) && first);
    CHECK(vgpu_table_put_in_page(&b, &first) && first);
    vgpu_table_purge(is_owned_by, &first_context);
    CHECK(vgpu_table_count() == before + 2);
    CHECK(vgpu_table_take(VGPU_KIND_POINTER, b.key, &b) && vgpu_table_leave_page(&b, &page));
    CHECK(page.owner == &second_context && vgpu_table_count() == before);
}

static void *table_thread(void *argument)
{
    uint64_t base = (uint64_t)(uintptr_t)argument << 20;
    struct vgpu_entry entry;
    for (uint64_t i = 1; i < 2000; i++) {
        entry = (struct vgpu_entry){.kind = VGPU_KIND_MIPMAP, .key = base + i, .bytes = i};
        CHECK(vgpu_table_put(&entry));
        CHECK(vgpu_table_take(VGPU_KIND_MIPMAP, base + i, &entry) && entry.bytes == i);
    }
    return NULL;
}

/* Slots of `usage`. Their locks belong to processes, so the test forks. */
static void test_slots(void)
{
    char path[] = "/tmp/vgpu-unit-XXXXXX";
    int fd = mkstemp(path);
    unlink(path);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(struct vgpu_usage)) == 0);
    struct vgpu_usage *page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED);
    int own = vgpu_slot_claim(fd, page);
    CHECK(own == 0 && page->slots[0].owner == VGPU_OWNER_SELF && page->slot_high == 1);
    pid_t child = fork();
    if (child == 0) {
        int slot = vgpu_slot_claim(fd, page);
        if (slot == 1) {
            page->slots[1].devices[0].used_bytes = 77;
            raise(9);
        }
        _exit(3);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    CHECK(vgpu_slot_others(page, 0));
    CHECK(page->slots[1].devices[0].used_bytes == 77); /* the dead process's memory counts until its slot is cleared */
    /* while an arbiter runs, only the arbiter clears registered slots */
    page->slots[1].owner = 5;
    CHECK(vgpu_slot_clear_dead(fd, page, 0, false) == 0 && page->slots[1].devices[0].used_bytes == 77);
    page->slots[1].owner = VGPU_OWNER_SELF;
    CHECK(vgpu_slot_clear_dead(fd, page, 0, false) == 1);
    page->slots[1].owner = 5;
    CHECK(vgpu_slot_clear_dead(fd, page, 0, true) == 1);
    CHECK(page->slots[1].owner == 0 && page->slots[1].devices[0].used_bytes == 0);
    CHECK(!vgpu_slot_others(page, 0));
    CHECK(page->slots[0].owner == VGPU_OWNER_SELF);
    close(fd);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The lock on the open file description is the arbiter's, which holds it while it clears the slot. */
static void test_wait_for_a_slot_that_the_arbiter_clears(void)
{
    int fd = memfd_create("usage", 0);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(struct vgpu_usage)) == 0);
    struct vgpu_usage *page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pid_t ended = fork();
    if (ended == 0)
        _exit(0);
    CHECK(page != MAP_FAILED && waitpid(ended, NULL, 0) == ended);
    page->slots[1].pid = ended;
    page->slots[1].owner = 5;
    page->slot_high = 2;
    struct flock lock = {.l_type = F_WRLCK,
                         .l_whence = SEEK_SET,
                         .l_start = (off_t)(offsetof(struct vgpu_usage, slots) + sizeof(struct vgpu_slot)),
                         .l_len = 1};
    CHECK(fcntl(fd, F_OFD_SETLK, &lock) == 0);
    int64_t before_ms = now_ms();
    CHECK(!vgpu_slot_await_clear(fd, page, 0)); /* the result is false, because nothing clears the slot in this test */
    CHECK(now_ms() - before_ms >= 999);
    munmap(page, sizeof(*page));
    close(fd);
}

int main(void)
{
    usage = mmap(NULL, sizeof(*usage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared_limits = mmap(NULL, sizeof(*shared_limits), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    /* the next three tests fork, so they run before threads are started */
    test_wait_for_a_slot_that_the_arbiter_clears();
    test_slots();
    test_a_busy_cpu_does_not_prolong_a_refusal();
    test_never_over_the_limit();
    test_one_of_many_wins();
    test_a_request_waits_while_bytes_are_counted_twice();
    test_account_edges();
    test_limits_never_torn();
    test_bad_limits_are_refused();
    test_uuids();
    test_table();
    test_table_purge();
    test_table_pages();
    test_table_pages_of_contexts();
    on_threads(table_thread, 0);
    puts("ok");
    return 0;
}

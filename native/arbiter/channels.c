#include "channels.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "rm.h"
#include "usage_io.h"

#define READ_TRIES 8

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

/*
 * Time after which copying or closing a tenant's file counts as stuck. The file of an honest process is copied and
 * closed in microseconds.
 */
#define STUCK_NS 50000000u

struct worker {
    struct channels_thread *of;
    struct channels_order *order; /* the order in progress; NULL if there is none */
    /* atomic: when the worker began to copy or close a file of the tenant, which may hang; 0: it does neither */
    uint64_t foreign_since;
    bool left;       /* the worker is abandoned, and another worker has its place */
    uint64_t tenant; /* the tenant in whose order the worker was abandoned */
    struct worker *next_left;
};

struct channels_thread {
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct channels_order *first;
    struct channels_order **last;
    struct worker *worker;
};

static pthread_mutex_t left_lock = PTHREAD_MUTEX_INITIALIZER;
static struct worker *left_workers;

static struct source finished_source;
static pthread_mutex_t finished_lock = PTHREAD_MUTEX_INITIALIZER;
static struct channels_order *finished;
static struct channels_order **finished_last = &finished;
static void (*report)(struct channels_order *order);
static const char *control_path;
static struct stat control_device;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- the table of a slot */

bool channels_uuid(const char *text, uint8_t uuid[16])
{
    unsigned digits = 0;
    if (strncmp(text, "GPU-", 4) != 0)
        return false;
    memset(uuid, 0, 16);
    for (text += 4; *text != '\0' && digits < 32; text++) {
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text))
            return false;
        unsigned value = isdigit((unsigned char)*text) ? (unsigned)(*text - '0')
                                                       : (unsigned)(tolower((unsigned char)*text) - 'a' + 10);
        uuid[digits / 2] = (uint8_t)(uuid[digits / 2] | value << (digits % 2 == 0 ? 4 : 0));
        digits++;
    }
    return digits == 32 && *text == '\0';
}

/*
 * Reads the channel groups from a slot's table, if possible between two equal, even generations (the generation is odd
 * while the process writes the table). After `tries` attempts it takes what was read last. Returns false if the table
 * cannot be read, is too long or has no group.
 */
static bool read_table(int usage_fd, uint32_t slot, uint32_t tries, uint32_t *budget, struct vgpu_channel_table *table)
{
    off_t at = (off_t)(VGPU_CHANNELS_AT + slot * sizeof(*table));
    size_t head = offsetof(struct vgpu_channel_table, groups);
    for (uint32_t attempt = 0; attempt < tries; attempt++) {
        uint64_t after;
        if (pread(usage_fd, table, head, at) != (ssize_t)head || table->count > VGPU_MAX_GROUPS ||
            table->count > *budget)
            return false;
        size_t size = table->count * sizeof(table->groups[0]);
        *budget -= table->count;
        if (pread(usage_fd, table->groups, size, at + (off_t)head) != (ssize_t)size ||
            pread(usage_fd, &after, sizeof(after), at) != (ssize_t)sizeof(after))
            return false;
        if (after == table->generation && (after & 1) == 0)
            return table->count > 0;
    }
    /*
     * The generation did not settle: the writer has stopped or writes endlessly. What was read is used, because the
     * driver refuses channels that do not exist.
     */
    return table->count > 0;
}

bool channels_read(int usage_fd, uint32_t slot, const uint8_t uuid[16], uint32_t *budget,
                   struct channels_process *process)
{
    static struct vgpu_channel_table table; /* used only by the event loop's thread */
    *process = (struct channels_process){.slot = slot, .pidfd = -1};
    if (!read_table(usage_fd, slot, READ_TRIES, budget, &table))
        return false;
    process->groups = malloc(table.count * sizeof(table.groups[0]));
    process->off = table.off;
    process->doubtful = table.doubtful;
    for (uint32_t i = 0; process->groups != NULL && i < table.count; i++)
        if (memcmp(table.groups[i].uuid, uuid, sizeof(table.groups[i].uuid)) == 0)
            process->groups[process->count++] = table.groups[i];
    if (process->count > 0)
        return true;
    free(process->groups);
    process->groups = NULL;
    return false;
}

uint32_t channels_devices(int usage_fd, uint32_t slot, const uint8_t *const uuids[], uint32_t count, uint32_t *groups)
{
    static struct vgpu_channel_table table; /* used only by the event loop's thread */
    uint32_t bits = 0;
    uint32_t budget = VGPU_MAX_GROUPS;
    *groups = 0;
    if (!read_table(usage_fd, slot, 1, &budget, &table))
        return 0;
    *groups = table.count;
    for (uint32_t i = 0; i < table.count; i++)
        for (uint32_t d = 0; d < count; d++)
            if (memcmp(table.groups[i].uuid, uuids[d], sizeof(table.groups[i].uuid)) == 0)
                bits |= 1u << d;
    return bits;
}

static void write_bit(unsigned char *usage_map, uint32_t slot, size_t word, uint32_t ordinal, bool set)
{
    off_t at = (off_t)(VGPU_CHANNELS_AT + slot * sizeof(struct vgpu_channel_table) + word);
    uint32_t bits;
    if (!usage_io_load(usage_map, at, &bits, sizeof(bits)))
        return;
    bits = set ? bits | 1u << ordinal : bits & ~(1u << ordinal);
    usage_io_store(usage_map, at, &bits, sizeof(bits));
}

/*
 * Sets or clears a device's bit in the words `off` and `doubtful` of a slot's table (lease.h). The threads of all
 * devices and the event loop's thread write these words, so the function holds a lock. `doubtful` says that the bit in
 * `off` may be wrong, so it is set before `off` and cleared after it.
 */
static void write_states(unsigned char *usage_map, uint32_t slot, uint32_t ordinal, bool off, bool doubtful)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (doubtful)
        write_bit(usage_map, slot, offsetof(struct vgpu_channel_table, doubtful), ordinal, true);
    write_bit(usage_map, slot, offsetof(struct vgpu_channel_table, off), ordinal, off);
    if (!doubtful)
        write_bit(usage_map, slot, offsetof(struct vgpu_channel_table, doubtful), ordinal, false);
    pthread_mutex_unlock(&lock);
}

void channels_note(unsigned char *usage_map, uint32_t slot, uint32_t ordinal, bool off)
{
    write_states(usage_map, slot, ordinal, off, false);
}

bool channels_load(int usage_fd, uint32_t slot, struct channels_load *load)
{
    struct vgpu_channel_table head;
    off_t at = (off_t)(VGPU_CHANNELS_AT + slot * sizeof(head));
    size_t size = offsetof(struct vgpu_channel_table, groups);
    if (pread(usage_fd, &head, size, at) != (ssize_t)size)
        return false;
    uint32_t groups = head.count < VGPU_MAX_GROUPS ? head.count : VGPU_MAX_GROUPS;
    *load = (struct channels_load){
        .sampled_ms = head.samples, .waiting_ms = head.waiting, .busy_ms = head.unfinished, .groups = groups};
    return true;
}

/* --- a device's thread */

/*
 * Is the descriptor the driver's control device? It is checked by attributes that the file system caches, so that a
 * file system of the tenant (FUSE) is not asked.
 */
static bool is_control_device(int fd)
{
    struct statx about;
    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &about) != 0 ||
        (about.stx_mode & S_IFMT) != (control_device.st_mode & S_IFMT))
        return false;
    if (S_ISCHR(about.stx_mode))
        return makedev(about.stx_rdev_major, about.stx_rdev_minor) == control_device.st_rdev;
    return makedev(about.stx_dev_major, about.stx_dev_minor) == control_device.st_dev &&
           about.stx_ino == control_device.st_ino; /* the simulator's control device is a regular file */
}

static void refused(struct channels_order *order, int error, uint32_t status)
{
    order->failed++;
    order->error = error;
    order->status = status;
}

static void enter_foreign(struct worker *worker)
{
    __atomic_store_n(&worker->foreign_since, now_ns(), __ATOMIC_SEQ_CST);
}

/*
 * Called when the worker has returned from copying or closing the tenant's file. Returns false if the worker was
 * abandoned meanwhile; it must then not continue with the order.
 */
static bool leave_foreign(struct worker *worker)
{
    pthread_mutex_lock(&worker->of->lock);
    bool left = worker->left;
    __atomic_store_n(&worker->foreign_since, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&worker->of->lock);
    return !left;
}

/*
 * Makes one call for all channels in `list`, on a copy of the process's own file. Returns false if the worker was
 * abandoned.
 */
static bool call(struct worker *worker, struct channels_order *order, const struct channels_process *process,
                 const struct vgpu_channel_group *group, struct rm_disable_channels *list)
{
    struct rm_control control = {.client = group->client,
                                 .object = group->subdevice,
                                 .command = RM_DISABLE_CHANNELS,
                                 .parameters = (uint64_t)(uintptr_t)list,
                                 .parameters_size = sizeof(*list)};
    enter_foreign(worker);
    int file = (int)syscall(SYS_pidfd_getfd, process->pidfd, (int)group->file, 0);
    int error = errno;
    if (!leave_foreign(worker)) {
        if (file >= 0)
            close(file);
        return false;
    }
    if (file < 0) {
        if (error == EBADF)
            order->missing++;
        else if (error != ESRCH) /* ESRCH: the process is dead or exits, and the driver removes its channels */
            refused(order, error, 0);
        return true;
    }
    order->calls++;
    write_states(order->usage_map, process->slot, order->ordinal, true, true);
    order->last_began_ns = now_ns();
    if (!is_control_device(file))
        refused(order, ENODEV, 0);
    else if (ioctl(file, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &control) != 0)
        refused(order, errno, 0);
    else if (control.status != RM_OK)
        refused(order, 0, control.status);
    order->last_ended_ns = now_ns();
    if (order->first_ended_ns == 0)
        order->first_ended_ns = order->last_ended_ns;
    enter_foreign(worker);
    close(file);
    return leave_foreign(worker);
}

static bool same_call(const struct vgpu_channel_group *a, const struct vgpu_channel_group *b)
{
    return a->file == b->file && a->client == b->client && a->subdevice == b->subdevice;
}

/*
 * Carries out an order for one process. Successive groups of one file, client and subdevice share a call, because the
 * duration of a call does not depend on the number of channels in it. Returns false if the worker was abandoned.
 */
static bool carry_out_process(struct worker *worker, struct channels_order *order, struct channels_process *process)
{
    struct rm_disable_channels list = {.count = 0};
    uint32_t calls = 0;
    uint32_t first = 0; /* index of the first channel of this call */
    uint32_t done = 0;
    uint32_t asked = process->count;
    process->count = 0;
    for (uint32_t i = 0; i < asked; i++) {
        const struct vgpu_channel_group *group = &process->groups[i];
        uint32_t count = group->count < VGPU_GROUP_CHANNELS ? group->count : VGPU_GROUP_CHANNELS;
        list.disable = order->off;
        for (uint32_t c = 0; c < count; c++) {
            list.clients[list.count] = group->client;
            list.channels[list.count++] = group->channels[c];
        }
        bool last = i + 1 == asked || !same_call(group, &process->groups[i + 1]) ||
                    list.count + VGPU_GROUP_CHANNELS > RM_DISABLE_CHANNELS_MAX;
        if (!last)
            continue;
        if (++calls > CHANNELS_PROCESS_CALLS_MAX || now_ns() > order->began_ns + CHANNELS_ORDER_NS_MAX) {
            refused(order, E2BIG, 0);
            return true;
        }
        uint32_t undone = order->failed + (order->off ? order->missing : 0);
        if (list.count > 0 && !call(worker, order, process, group, &list))
            return false;
        for (uint32_t g = first; g <= i && order->failed + (order->off ? order->missing : 0) == undone; g++)
            process->groups[done++] = process->groups[g];
        process->count = done;
        first = i + 1;
        memset(&list, 0, sizeof(list));
    }
    if (done == asked)
        channels_note(order->usage_map, process->slot, order->ordinal, order->off);
    return true;
}

static bool carry_out(struct worker *worker, struct channels_order *order)
{
    order->began_ns = now_ns();
    for (uint32_t p = 0; p < order->process_count; p++)
        if (!carry_out_process(worker, order, &order->processes[p]))
            return false;
    order->ended_ns = now_ns();
    return true;
}

static void finish(struct channels_order *order)
{
    uint64_t one = 1;
    pthread_mutex_lock(&finished_lock);
    order->next = NULL;
    *finished_last = order;
    finished_last = &order->next;
    pthread_mutex_unlock(&finished_lock);
    (void)!write(finished_source.fd, &one, sizeof(one));
}

/* Frees an abandoned worker and its order, after the worker has returned from its blocked call. */
static void come_back(struct worker *worker, struct channels_order *order)
{
    struct worker **link = &left_workers;
    pthread_mutex_lock(&left_lock);
    while (*link != worker)
        link = &(*link)->next_left;
    *link = worker->next_left;
    pthread_mutex_unlock(&left_lock);
    channels_order_free(order);
    free(worker);
}

static void *serve(void *argument)
{
    struct worker *worker = argument;
    struct channels_thread *thread = worker->of;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    for (;;) {
        pthread_mutex_lock(&thread->lock);
        while (thread->first == NULL)
            pthread_cond_wait(&thread->news, &thread->lock);
        struct channels_order *order = thread->first;
        thread->first = order->next;
        if (thread->first == NULL)
            thread->last = &thread->first;
        worker->order = order;
        pthread_mutex_unlock(&thread->lock);
        if (!carry_out(worker, order)) {
            come_back(worker, order);
            return NULL;
        }
        pthread_mutex_lock(&thread->lock);
        worker->order = NULL;
        pthread_mutex_unlock(&thread->lock);
        finish(order);
    }
    return NULL;
}

static struct worker *worker_start(struct channels_thread *thread)
{
    pthread_t id;
    sigset_t all;
    sigset_t before;
    struct worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL)
        return NULL;
    worker->of = thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&id, NULL, serve, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        free(worker);
        return NULL;
    }
    pthread_detach(id);
    return worker;
}

struct channels_thread *channels_thread_start(void)
{
    struct channels_thread *thread = calloc(1, sizeof(*thread));
    if (thread == NULL)
        return NULL;
    pthread_mutex_init(&thread->lock, NULL);
    pthread_cond_init(&thread->news, NULL);
    thread->last = &thread->first;
    thread->worker = worker_start(thread);
    if (thread->worker != NULL)
        return thread;
    free(thread);
    return NULL;
}

/*
 * Abandons the thread's worker if its order hangs, and starts another worker. Returns the order, which stays with the
 * abandoned worker; NULL if no order hangs or no worker can be started. Precondition: the caller holds the thread's
 * lock.
 */
static struct channels_order *take_stuck(struct channels_thread *thread, uint64_t now)
{
    struct worker *stuck = thread->worker;
    uint64_t since = __atomic_load_n(&stuck->foreign_since, __ATOMIC_SEQ_CST);
    if (since == 0 || now < since + STUCK_NS)
        return NULL;
    struct worker *next = worker_start(thread);
    if (next == NULL)
        return NULL;
    thread->worker = next;
    stuck->left = true;
    stuck->tenant = stuck->order->tenant;
    pthread_mutex_lock(&left_lock);
    stuck->next_left = left_workers;
    left_workers = stuck;
    pthread_mutex_unlock(&left_lock);
    return stuck->order;
}

uint64_t channels_check(struct channels_thread *thread, uint64_t now)
{
    struct channels_order answer = {0};
    pthread_mutex_lock(&thread->lock);
    struct channels_order *order = take_stuck(thread, now);
    if (order != NULL)
        answer = *order; /* a copy of the order: the original stays with its worker, which may return at any time */
    bool busy = thread->worker->order != NULL || thread->first != NULL;
    pthread_mutex_unlock(&thread->lock);
    if (order != NULL) {
        answer.process_count = 0;
        answer.processes = NULL;
        answer.failed++;
        answer.error = ETIMEDOUT;
        answer.ended_ns = now;
        report(&answer);
    }
    return busy ? now + STUCK_NS : UINT64_MAX;
}

bool channels_barred(uint64_t tenant)
{
    pthread_mutex_lock(&left_lock);
    const struct worker *worker = left_workers;
    while (worker != NULL && worker->tenant != tenant)
        worker = worker->next_left;
    pthread_mutex_unlock(&left_lock);
    return worker != NULL;
}

void channels_submit(struct channels_thread *thread, struct channels_order *order)
{
    order->next = NULL;
    pthread_mutex_lock(&thread->lock);
    *thread->last = order;
    thread->last = &order->next;
    pthread_mutex_unlock(&thread->lock);
    pthread_cond_signal(&thread->news); /* not under the lock: the thread would wake to wait for it */
}

/* --- the loop's thread */

void channels_order_free(struct channels_order *order)
{
    for (uint32_t p = 0; p < order->process_count; p++) {
        close(order->processes[p].pidfd);
        free(order->processes[p].groups);
    }
    free(order->processes);
    usage_io_unmap(order->usage_map);
    free(order);
}

static void take_finished(struct source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    (void)!read(source->fd, &count, sizeof(count));
    pthread_mutex_lock(&finished_lock);
    struct channels_order *order = finished;
    finished = NULL;
    finished_last = &finished;
    pthread_mutex_unlock(&finished_lock);
    for (struct channels_order *next; order != NULL; order = next) {
        next = order->next;
        report(order);
        channels_order_free(order);
    }
}

bool channels_device(void)
{
    return stat(control_path, &control_device) == 0;
}

int channels_open(const char *path, void (*done)(struct channels_order *order))
{
    report = done;
    control_path = path;
    finished_source = (struct source){.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), .ready = take_finished};
    if (finished_source.fd < 0)
        return -errno;
    return loop_add(&finished_source, EPOLLIN);
}

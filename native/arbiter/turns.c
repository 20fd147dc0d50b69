#include "turns.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "aside.h"
#include "cut.h"
#include "lease_limits.h"
#include "rest.h"
#include "usage_io.h"

#define REFRESH_NS 10000000u /* least interval between two readings of the limits of tenants under the engine cut */
#define READ_TRIES 8
/* a longer transit time of a message means that the sender is in another time namespace */
#define TRANSIT_MAX_NS 2000000u
#define WATCH_UNSAID UINT32_MAX /* no flags of watch_of(): tell_watches() sends them again */

static struct source timer;
static uint64_t armed_for = SCHED_NEVER;
static struct lease *touched; /* leases whose counters have changed */
static bool stale;            /* something has changed since the scheduler last ran */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void arm(uint64_t at)
{
    struct itimerspec when = {0};
    if (at == armed_for)
        return;
    if (at != SCHED_NEVER) {
        when.it_value.tv_sec = (time_t)(at / 1000000000u);
        when.it_value.tv_nsec = (long)(at % 1000000000u);
    }
    timerfd_settime(timer.fd, TFD_TIMER_ABSTIME, &when, NULL);
    armed_for = at;
}

#define COUNTERS_AT ((off_t)offsetof(struct vgpu_usage, compute))

static void bring_in_counters(void *data)
{
    const int *usage_fd = data;
    usage_io_bring_in(*usage_fd, COUNTERS_AT);
    close(*usage_fd);
}

/* Returns true if the counters of the lease can be written without waiting for the tenant. */
static bool counters_in_memory(struct lease *lease)
{
    if (usage_io_in_memory(lease->usage_map, COUNTERS_AT))
        return true;
    uint64_t took_ns;
    int copy = rest_afford(lease, 1) ? fcntl(lease->usage_fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0)
        return false;
    enum aside done = aside(lease_tenant(lease), bring_in_counters, &copy, sizeof(copy), &took_ns);
    if (done == ASIDE_NOT_BEGUN)
        close(copy);
    else
        rest_spent_on_look(lease, took_ns);
    return done == ASIDE_DONE;
}

/*
 * Publishes a lease's counters in its `usage` page. The tenant can write the page, so the arbiter never reads the
 * counters back. If the page is not in memory and cannot be brought in, the published counters stay old until they
 * change again.
 */
static void publish(struct lease *lease)
{
    struct vgpu_compute count[VGPU_MAX_DEVICES];
    uint32_t devices = lease->tenant.device_count;
    if (!counters_in_memory(lease))
        return;
    for (uint32_t d = 0; d < devices; d++)
        count[d] = lease->tenant.entities[d]->count;
    usage_io_store(lease->usage_map, COUNTERS_AT, count, devices * sizeof(count[0]));
}

static void touch(struct lease *lease)
{
    if (lease->touched)
        return;
    lease->touched = true;
    lease->touched_next = touched;
    touched = lease;
}

static void untouch(struct lease *lease)
{
    struct lease **link = &touched;
    while (*link != NULL && *link != lease)
        link = &(*link)->touched_next;
    if (*link != NULL)
        *link = lease->touched_next;
    lease->touched = false;
}

void turns_lease_settle(struct lease *lease)
{
    if (!lease->touched)
        return;
    untouch(lease);
    publish(lease);
}

static struct connection *connection_of(struct sched_member *member)
{
    return (struct connection *)((char *)member - offsetof(struct connection, member));
}

/*
 * Sends a message. If a tenant does not read its socket, its connection is shut down; the hang-up is handled as an
 * event.
 */
static void say(struct sched_member *member, const struct vgpu_message *message)
{
    int fd = connection_of(member)->socket.fd;
    if (send(fd, message, sizeof(*message), MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof(*message))
        shutdown(fd, SHUT_RDWR);
}

static void say_cut(struct connection *connection, uint32_t watch)
{
    struct vgpu_message message = {.kind = VGPU_MSG_CUT, .version = VGPU_LEASE_VERSION};
    message.turn.flags = watch;
    connection->watch = watch;
    say(&connection->member, &message);
}

/*
 * Returns what a tenant under the engine cut must report (enum vgpu_turn_flags). A tenant on devices without time
 * slices need not report that it is idle. A tenant whose work preempts others must report the end of its work at once.
 */
static uint32_t watch_of(const struct lease *lease)
{
    uint32_t flags = 0;
    for (uint32_t d = 0; d < lease->tenant.device_count; d++) {
        const struct sched_entity *entity = lease->tenant.entities[d];
        if (entity->device->managed)
            flags |= VGPU_TURN_WATCH | (entity->limits.priority > 0 ? VGPU_TURN_BRIEF : 0);
    }
    return flags;
}

static void tell_watches(void)
{
    for (struct lease *lease = cut_lease_next(NULL); lease != NULL; lease = cut_lease_next(lease)) {
        uint32_t watch = watch_of(lease);
        for (struct connection *c = lease->connections; c != NULL; c = c->next)
            if (c->joined && c->member.cut && c->watch != watch)
                say_cut(c, watch);
    }
}

/*
 * Reads the limits of tenants under the engine cut again. (A tenant under the gate requests each slice, and its limits
 * are read then; a tenant under the cut with endless work sends nothing.)
 */
static void refresh_cut(uint64_t now)
{
    static uint64_t refreshed_at;
    if (now < refreshed_at + REFRESH_NS)
        return;
    refreshed_at = now;
    for (struct lease *lease = cut_lease_next(NULL); lease != NULL; lease = cut_lease_next(lease))
        turns_lease_refresh(lease);
}

/* Disconnects the processes of tenants for which the engine cut was given up; they connect again with the gate. */
static void gate_refused(void)
{
    for (struct lease *lease = cut_lease_next(NULL), *next; lease != NULL; lease = next) {
        next = cut_lease_next(lease);
        if (!cut_refused(lease))
            continue;
        cut_lease_remove(lease);
        for (struct connection *c = lease->connections; c != NULL; c = c->next) {
            turns_leave(c);
            shutdown(c->socket.fd, SHUT_RDWR);
        }
    }
}

static void run_if_stale(void)
{
    uint64_t again = SCHED_NEVER;
    if (!stale)
        return;
    refresh_cut(now_ns());
    while (stale) { /* the end of one slice may start another one, so the scheduler runs again */
        stale = false;
        uint64_t now = now_ns();
        again = sched_run(now);
        uint64_t cut = cut_follow(now);
        again = cut < again ? cut : again;
        gate_refused();
    }
    tell_watches();
    arm(again);
    for (struct lease *lease = touched, *next; lease != NULL; lease = next) {
        next = lease->touched_next;
        lease->touched = false;
        publish(lease);
    }
    touched = NULL;
}

static void look_again(void)
{
    stale = true;
}

static void timer_ready(struct source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    if (read(source->fd, &count, sizeof(count)) > 0) {
        armed_for = SCHED_NEVER;
        stale = true;
    }
}

/*
 * Reads a whole limits page between two equal, even generations. vgpud may be writing the page at this moment. Returns
 * false if that lasts for READ_TRIES attempts, or the page is not valid.
 */
static bool read_limits(int fd, struct vgpu_limits *limits)
{
    struct vgpu_limits page = {.magic = 0};
    for (int attempt = 0; attempt < READ_TRIES; attempt++) {
        uint64_t after;
        if (pread(fd, &page, sizeof(page), 0) < (ssize_t)VGPU_LIMITS_BYTES_LEAST ||
            pread(fd, &after, sizeof(after), offsetof(struct vgpu_limits, generation)) != (ssize_t)sizeof(after))
            return false;
        if (page.generation == after && (after & 1) == 0)
            return vgpu_limits_read(&page, limits) == 0;
    }
    return false;
}

/* Starts or ends a pause. For the scheduler a paused tenant has no work; cut_follow disables its channels. */
static void set_paused(struct lease *lease, bool paused)
{
    uint64_t now = now_ns();
    if (lease->paused == paused)
        return;
    lease->paused = paused;
    for (struct connection *c = lease->connections; c != NULL; c = c->next) {
        if (!c->joined || !c->member.cut || !c->works)
            continue;
        if (paused)
            sched_idle(&c->member, 0, now);
        else
            sched_want(&c->member, cut_devices(lease, c->slot), now);
    }
}

static void set_limits(struct lease *lease, const struct vgpu_limits *limits)
{
    for (uint32_t d = 0; d < lease->tenant.device_count && d < limits->device_count; d++) {
        const struct vgpu_device_limits *from = &limits->devices[d];
        struct sched_limits to = {from->share, from->share_policy, from->priority};
        sched_set_limits(&lease->tenant, d, &to);
    }
    lease->generation = limits->generation;
    lease->suspended = limits->state == VGPU_LEASE_SUSPENDED;
    set_paused(lease, limits->state == VGPU_LEASE_OPEN && limits->paused == 1);
    stale = true;
}

void turns_lease_add(struct lease *lease)
{
    struct vgpu_limits limits;
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_BYTES];
    if (lease->schedules || !read_limits(lease->limits_fd, &limits))
        return;
    for (uint32_t d = 0; d < limits.device_count; d++)
        memcpy(uuids[d], limits.devices[d].uuid, sizeof(uuids[d]));
    lease->schedules = sched_tenant_add(&lease->tenant, limits.device_count, (const char (*)[VGPU_UUID_BYTES])uuids);
    if (lease->schedules) {
        set_limits(lease, &limits);
        cut_lease_add(lease);
    }
}

static bool same_devices(const struct lease *lease, const struct vgpu_limits *limits)
{
    for (uint32_t d = 0; d < lease->tenant.device_count && d < limits->device_count; d++)
        if (strncmp(lease->tenant.entities[d]->device->uuid, limits->devices[d].uuid, VGPU_UUID_BYTES) != 0)
            return false;
    return limits->device_count == lease->tenant.device_count;
}

bool turns_lease_moved(const struct lease *lease)
{
    struct vgpu_limits limits;
    return lease->schedules && read_limits(lease->limits_fd, &limits) && !same_devices(lease, &limits);
}

void turns_lease_follow(struct lease *lease)
{
    struct vgpu_compute count[VGPU_MAX_DEVICES];
    uint32_t devices = lease->tenant.device_count;
    for (uint32_t d = 0; d < devices; d++)
        count[d] = lease->tenant.entities[d]->count;
    turns_lease_remove(lease);
    turns_lease_add(lease);
    for (uint32_t d = 0; d < devices && d < lease->tenant.device_count; d++)
        lease->tenant.entities[d]->count = count[d];
}

void turns_lease_refresh(struct lease *lease)
{
    struct vgpu_limits limits;
    uint64_t generation;
    if (!lease->schedules)
        return;
    off_t at = (off_t)offsetof(struct vgpu_limits, generation);
    if (pread(lease->limits_fd, &generation, sizeof(generation), at) == (ssize_t)sizeof(generation) &&
        generation != lease->generation && read_limits(lease->limits_fd, &limits) && same_devices(lease, &limits))
        set_limits(lease, &limits);
}

void turns_lease_remove(struct lease *lease)
{
    if (!lease->schedules)
        return;
    cut_lease_remove(lease);
    sched_tenant_remove(&lease->tenant, now_ns());
    lease->schedules = false;
    untouch(lease);
    stale = true;
}

void turns_join(struct connection *connection)
{
    if (connection->joined || !connection->lease->schedules)
        return;
    sched_member_add(&connection->lease->tenant, &connection->member, now_ns());
    connection->joined = true;
    connection->works = false;
    stale = true;
    connection->member.cut = connection->lease->cut_entities != NULL;
    if (connection->member.cut) {
        cut_lease_stale(connection->lease);
        say_cut(connection, watch_of(connection->lease) | VGPU_TURN_WATCH);
    }
}

void turns_leave(struct connection *connection)
{
    if (!connection->joined)
        return;
    sched_member_remove(&connection->member, now_ns());
    connection->joined = false;
    touch(connection->lease);
    stale = true;
}

/*
 * Handles a message of a member under the engine cut. The message does not decide whether the member is on its devices.
 */
static void cut_message(struct connection *connection, const struct vgpu_message *message, uint64_t now)
{
    struct sched_member *member = &connection->member;
    connection->works = message->kind == VGPU_MSG_WANT;
    if (connection->lease->paused) {
        return;
    } else if (message->kind == VGPU_MSG_WANT) {
        sched_want(member, cut_devices(connection->lease, connection->slot) | message->turn.devices, now);
        /*
         * the answer wakes the process's thread that checks for idleness, which may have slept while the process was
         * idle; it is sent after the orders that follow from the message, which should not wait for it
         */
        connection->watch = WATCH_UNSAID;
    } else if (message->kind == VGPU_MSG_DONE) {
        cut_note_load(connection->lease, now);
        sched_idle(member, message->turn.length_ns, now);
    }
}

bool turns_message(struct connection *connection, const struct vgpu_message *message)
{
    const struct vgpu_turn *turn = &message->turn;
    if (!connection->joined)
        return false;
    turns_lease_refresh(connection->lease);
    uint64_t now = now_ns();
    uint64_t transit = now > turn->sent_ns && now - turn->sent_ns < TRANSIT_MAX_NS ? now - turn->sent_ns : 0;
    if (message->kind == VGPU_MSG_CHANNELS) {
        cut_lease_stale(connection->lease);
    } else if (connection->member.cut && (turn->flags & VGPU_TURN_GATED) == 0) {
        cut_message(connection, message, now);
    } else if (message->kind == VGPU_MSG_WANT) {
        if (connection->member.cut) { /* the process was under the engine cut, and has the gate from now on */
            sched_idle(&connection->member, 0, now);
            connection->member.cut = false;
        }
        sched_want(&connection->member, turn->devices, now);
    } else if (message->kind == VGPU_MSG_DONE) {
        struct vgpu_turn over = *turn;
        over.length_ns += transit;
        sched_done(&connection->member, &over, now);
    }
    touch(connection->lease);
    stale = true;
    return true;
}

/*
 * Sends a message about a slice. A tenant under the engine cut gets none, because its channels are enabled and disabled
 * without its help.
 */
static void say_turn(struct sched_member *member, const struct vgpu_message *message)
{
    /* the lease's counters have changed, perhaps because of another tenant's message */
    touch(connection_of(member)->lease);
    if (!member->cut)
        say(member, message);
}

static void say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    struct vgpu_message message = {.kind = VGPU_MSG_GRANT, .version = VGPU_LEASE_VERSION, .turn = *turn};
    message.turn.sent_ns = now_ns();
    say_turn(member, &message);
}

static void say_revoke(struct sched_member *member)
{
    struct vgpu_message message = {.kind = VGPU_MSG_REVOKE, .version = VGPU_LEASE_VERSION};
    message.turn.number = member->turn;
    say_turn(member, &message);
}

void turns_look(struct connection *connection)
{
    struct vgpu_message message = {.kind = VGPU_MSG_LOOK, .version = VGPU_LEASE_VERSION};
    if (connection->joined)
        say(&connection->member, &message);
}

static const struct sched_messages messages = {.grant = say_grant, .revoke = say_revoke};

int turns_open(int run_fd, const char *control_device)
{
    timer = (struct source){.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), .ready = timer_ready};
    if (timer.fd < 0)
        return -errno;
    sched_open(&messages);
    loop_after(run_if_stale);
    int error = loop_add(&timer, EPOLLIN);
    return error == 0 ? cut_open(run_fd, control_device, look_again) : error;
}

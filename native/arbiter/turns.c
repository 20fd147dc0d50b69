#include "turns.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "limits.h"

#define READ_TRIES 8
#define TRANSIT_MAX_NS 2000000u /* more is not time on the way but another time namespace */

static struct source timer;
static uint64_t armed_for = SCHED_NEVER;
static struct lease *touched; /* their counters have changed */
static bool stale;            /* something happened since sched last ran */

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

/* The page belongs to the tenant: written for whoever wants to read it, never read back. */
static void publish(const struct lease *lease)
{
    struct vgpu_compute count[VGPU_MAX_DEVICES];
    uint32_t devices = lease->tenant.device_count;
    for (uint32_t d = 0; d < devices; d++)
        count[d] = lease->tenant.places[d]->count;
    (void)!pwrite(lease->usage_fd, count, devices * sizeof(count[0]), (off_t)offsetof(struct vgpu_usage, compute));
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

static void run_if_stale(void)
{
    if (!stale)
        return;
    stale = false;
    arm(sched_run(now_ns()));
    loop_alert_until(sched_alert_until());
    for (struct lease *lease = touched, *next; lease != NULL; lease = next) {
        next = lease->touched_next;
        lease->touched = false;
        publish(lease);
    }
    touched = NULL;
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

int turns_open(void)
{
    timer = (struct source){.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), .ready = timer_ready};
    if (timer.fd < 0)
        return -errno;
    loop_after(run_if_stale);
    return loop_add(&timer, EPOLLIN);
}

/* A whole page between two equal, even generations. vgpud wrote it, and it may be writing now. */
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

static void set_limits(struct lease *lease, const struct vgpu_limits *limits)
{
    for (uint32_t d = 0; d < lease->tenant.device_count && d < limits->device_count; d++) {
        const struct vgpu_device_limits *from = &limits->devices[d];
        struct sched_limits to = {from->share, from->share_policy, from->priority, from->quantum_us};
        sched_set_limits(&lease->tenant, d, &to);
    }
    lease->generation = limits->generation;
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
    if (lease->schedules)
        set_limits(lease, &limits);
}

static bool same_devices(const struct lease *lease, const struct vgpu_limits *limits)
{
    for (uint32_t d = 0; d < lease->tenant.device_count && d < limits->device_count; d++)
        if (strncmp(lease->tenant.places[d]->device->uuid, limits->devices[d].uuid, VGPU_UUID_BYTES) != 0)
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
        count[d] = lease->tenant.places[d]->count;
    turns_lease_remove(lease);
    turns_lease_add(lease);
    for (uint32_t d = 0; d < devices && d < lease->tenant.device_count; d++)
        lease->tenant.places[d]->count = count[d];
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
    stale = true;
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

bool turns_message(struct connection *connection, const struct vgpu_message *message)
{
    const struct vgpu_turn *turn = &message->turn;
    if (!connection->joined)
        return false;
    turns_lease_refresh(connection->lease);
    uint64_t now = now_ns();
    uint64_t transit = now > turn->sent_ns && now - turn->sent_ns < TRANSIT_MAX_NS ? now - turn->sent_ns : 0;
    if (message->kind == VGPU_MSG_WANT) {
        sched_want(&connection->member, turn->devices, now);
    } else if (message->kind == VGPU_MSG_ENDING) {
        sched_ending(&connection->member, turn->number, turn->length_ns > transit ? turn->length_ns - transit : 0, now);
    } else {
        struct vgpu_turn over = *turn;
        over.length_ns += transit;
        sched_done(&connection->member, &over, now);
    }
    touch(connection->lease);
    stale = true;
    return true;
}

static struct connection *connection_of(struct sched_member *member)
{
    return (struct connection *)((char *)member - offsetof(struct connection, member));
}

/* A tenant that does not read its socket loses it; the hang-up is handled when it comes in. */
static void say(struct sched_member *member, const struct vgpu_message *message)
{
    int fd = connection_of(member)->socket.fd;
    if (send(fd, message, sizeof(*message), MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof(*message))
        shutdown(fd, SHUT_RDWR);
}

void sched_say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    struct vgpu_message message = {.kind = VGPU_MSG_GRANT, .version = VGPU_LEASE_VERSION, .turn = *turn};
    message.turn.sent_ns = now_ns();
    touch(connection_of(member)->lease); /* its counters moved, whoever's message it was */
    say(member, &message);
}

void sched_say_revoke(struct sched_member *member)
{
    struct vgpu_message message = {.kind = VGPU_MSG_REVOKE, .version = VGPU_LEASE_VERSION};
    message.turn.number = member->turn;
    touch(connection_of(member)->lease); /* a bypass is counted, whatever its process does */
    say(member, &message);
}

void turns_look(struct connection *connection)
{
    struct vgpu_message message = {.kind = VGPU_MSG_LOOK, .version = VGPU_LEASE_VERSION};
    if (connection->joined)
        say(&connection->member, &message);
}

void sched_say_soon(struct sched_member *member, uint64_t in_ns)
{
    struct vgpu_message message = {.kind = VGPU_MSG_SOON, .version = VGPU_LEASE_VERSION};
    message.turn.length_ns = in_ns;
    say(member, &message);
}

/*
 * fuzz_arbiter.c: the whole arbiter in this process, with a replaced event wait: where the arbiter would wait, the next
 * step of the input is done. A step belongs to a tenant (connect, packet, lock, close, bytes in `usage`, its size), to
 * vgpud (limits, control messages) or to the clock. A child process plays the tenant, because the kernel identifies
 * locks and peers by process.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"
#include "lease.h"
#include "loop.h"

enum { LEASES = 3, CONNECTIONS = 16, EVENTS_MAX = 4096 };

const char *const fuzz_words[] = {NULL};

int arbiter_main(int argc, char **argv);
int __real_epoll_wait(int fd, struct epoll_event *events, int most, int timeout);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int most, int timeout);
int __real_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now);

static char folder[] = "/dev/shm/fuzz-arbiter-XXXXXX";
static const uint8_t *input;
static size_t left;
static int connections[CONNECTIONS];
static int usages[LEASES], pages[LEASES], control = -1, tenant = -1;
static uint64_t ahead_ns;
static unsigned events_in_a_row;

/* --- the tenant's process */

enum order { CONNECT = 1, LOCK = 2, UNLOCK = 3, AGAIN = 4 };
struct order_message {
    uint8_t order, lease, slot;
};

static int connect_to(unsigned lease)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/leases/f%u/" VGPU_ARBITER_SOCKET, folder, lease);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

static void send_fd(int line, int fd)
{
    char word = fd >= 0;
    struct iovec part = {.iov_base = &word, .iov_len = 1};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } about = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = about.room;
        message.msg_controllen = sizeof(about.room);
        struct cmsghdr *item = CMSG_FIRSTHDR(&message);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(item), &fd, sizeof(fd));
    }
    if (sendmsg(line, &message, MSG_NOSIGNAL) < 0)
        _exit(1);
}

static void play_tenant(int line)
{
    struct order_message order;
    int files[LEASES] = {-1, -1, -1};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (recv(line, &order, sizeof(order), 0) == (ssize_t)sizeof(order)) {
        off_t at = (off_t)(offsetof(struct vgpu_usage, slots) + order.slot * sizeof(struct vgpu_slot));
        struct flock lock = {.l_type = order.order == LOCK ? F_WRLCK : F_UNLCK, .l_start = at, .l_len = 1};
        int fd = -1;
        if (order.order == CONNECT)
            fd = connect_to(order.lease % LEASES);
        else if (order.order == AGAIN)
            for (unsigned l = 0; l < LEASES; l++) {
                char path[128];
                snprintf(path, sizeof(path), "%s/leases/f%u/" VGPU_USAGE_FILE, folder, l);
                close(files[l]);
                files[l] = open(path, O_RDWR | O_CLOEXEC);
            }
        else
            fcntl(files[order.lease % LEASES], F_SETLK, &lock);
        send_fd(line, fd);
        if (fd >= 0)
            close(fd);
    }
    _exit(0);
}

static int ask_tenant(enum order order, uint8_t lease, uint8_t slot)
{
    struct order_message asked = {(uint8_t)order, lease, slot};
    char word;
    struct iovec part = {.iov_base = &word, .iov_len = 1};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } about = {0};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = about.room, .msg_controllen = sizeof(about.room)};
    if (send(tenant, &asked, sizeof(asked), 0) < 0 || recvmsg(tenant, &message, MSG_CMSG_CLOEXEC) != 1)
        abort();
    struct cmsghdr *item = CMSG_FIRSTHDR(&message);
    int fd = -1;
    if (item != NULL)
        memcpy(&fd, CMSG_DATA(item), sizeof(fd));
    return fd;
}

/* --- steps of the input */

static uint8_t byte(void)
{
    if (left == 0)
        return 0;
    left--;
    return *input++;
}

static size_t bytes(void *to, size_t most)
{
    size_t size = most < left ? most : left;
    memcpy(to, input, size);
    input += size;
    left -= size;
    return size;
}

static uint32_t word(void)
{
    uint32_t value = 0;
    bytes(&value, sizeof(value));
    return value;
}

static void drain(int fd)
{
    char sink[2048];
    while (fd >= 0 && recv(fd, sink, sizeof(sink), MSG_DONTWAIT) > 0)
        continue;
}

static void send_packet(int fd)
{
    struct vgpu_message message = {.kind = byte(), .version = VGPU_LEASE_VERSION, .slot = byte()};
    uint8_t odd = byte();
    /* before half of the registrations the tenant locks its slot; the arbiter refuses the others */
    if (message.kind == VGPU_MSG_REGISTER && (odd & 1) == 0)
        ask_tenant(LOCK, odd >> 1, (uint8_t)message.slot);
    bytes(&message.turn, sizeof(message.turn));
    if (odd == 0xff)
        message.version = word();
    size_t size = odd == 0xfe ? byte() : sizeof(message);
    (void)!send(fd, &message, size > sizeof(message) ? sizeof(message) : size, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void send_control(void)
{
    struct vgpu_message message = {.kind = byte(), .version = VGPU_LEASE_VERSION, .slot = VGPU_NO_SLOT};
    snprintf(message.allocation, sizeof(message.allocation), "f%u", byte() % (LEASES + 1));
    if (message.kind == 0xff)
        bytes(&message, sizeof(message));
    (void)!send(control, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
    drain(control);
}

static void write_usage(int fd)
{
    /* half of the writes go to the first slots and their channel tables */
    uint32_t place = word();
    uint8_t noise[255];
    size_t size = bytes(noise, byte());
    uint32_t end = place & 1 ? (uint32_t)VGPU_USAGE_FILE_BYTES : VGPU_CHANNELS_AT + 4096;
    (void)!pwrite(fd, noise, size, (off_t)((place >> 1) % end));
}

static void write_limits(int fd)
{
    struct vgpu_limits limits;
    if (pread(fd, &limits, sizeof(limits), 0) != (ssize_t)sizeof(limits))
        abort();
    limits.generation += 2;
    limits.state = byte() % 5;
    limits.device_count = 1 + byte() % 2;
    for (unsigned d = 0; d < 2; d++) {
        limits.devices[d].share = 1 + word() % VGPU_SHARE_ALL;
        limits.devices[d].share_policy = byte() % 3;
        limits.devices[d].priority = (int8_t)byte();
        limits.devices[d].reserved = word();
    }
    (void)!pwrite(fd, &limits, sizeof(limits), 0);
}

static void step(void)
{
    uint8_t what = byte(), which = byte();
    int *connection = &connections[which % CONNECTIONS], lease = which % LEASES;
    switch (what % 11) {
    case 0:
        if (*connection >= 0)
            close(*connection);
        *connection = ask_tenant(CONNECT, byte(), 0);
        break;
    case 1:
    case 2:
    case 3:
        if (*connection >= 0)
            send_packet(*connection);
        break;
    case 4:
        drain(*connection);
        break;
    case 5:
        if (*connection >= 0)
            close(*connection);
        *connection = -1;
        break;
    case 6:
        write_usage(usages[lease]);
        break;
    case 7:
        (void)!ftruncate(usages[lease], (off_t)(word() % (2 * VGPU_USAGE_FILE_BYTES)));
        break;
    case 8:
        ask_tenant(byte() % 2 ? LOCK : UNLOCK, which, byte());
        break;
    case 9:
        send_control();
        break;
    default:
        if (which % 2)
            write_limits(pages[lease]);
        else
            ahead_ns += (uint64_t)(word() % 2000000000u);
    }
}

/* --- the loop */

int __wrap_epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    int count = __real_epoll_wait(fd, events, most, 0);
    if (most == 1) /* the arbiter takes one event of a slow source (loop.h), and does not wait for it */
        return count;
    (void)timeout;
    if (count != 0 && ++events_in_a_row < EVENTS_MAX)
        return count;
    if (count != 0)
        abort(); /* abort: the arbiter's loop spins, as more events arrive than the steps of the input have caused */
    events_in_a_row = 0;
    if (left == 0) {
        errno = ECANCELED;
        return -1;
    }
    step();
    return 0;
}

int __wrap_clock_gettime(clockid_t id, struct timespec *now)
{
    int done = __real_clock_gettime(id, now);
    uint64_t ns = (uint64_t)now->tv_sec * 1000000000u + (uint64_t)now->tv_nsec + (id == CLOCK_MONOTONIC ? ahead_ns : 0);
    now->tv_sec = (time_t)(ns / 1000000000u);
    now->tv_nsec = (long)(ns % 1000000000u);
    return done;
}

/*
 * Closes the last connection. The arbiter then holds only the leases' memory; the sanitizer reports anything else as a
 * leak.
 */
static void end(void)
{
    char command[128];
    close(control);
    left = 0;
    loop_run();
    snprintf(command, sizeof(command), "rm -r %s", folder);
    (void)!system(command);
}

static const struct vgpu_limits fresh_limits = {
    .magic = VGPU_LEASE_MAGIC,
    .version = VGPU_LEASE_VERSION,
    .allocation = "f",
    .state = VGPU_LEASE_OPEN,
    .device_count = 2,
    .devices = {{.uuid = "GPU-00000000-0000-0000-0000-000000000001",
                 .memory_bytes = 1 << 30,
                 .share = 2500,
                 .share_policy = VGPU_SHARE_HARD},
                {.uuid = "GPU-00000000-0000-0000-0000-000000000002",
                 .memory_bytes = 1 << 30,
                 .share = 5000,
                 .share_policy = VGPU_SHARE_WORK_CONSERVING}},
};

static int make_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        abort();
    return fd;
}

static void make_leases(void)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/leases", folder);
    mkdir(path, 0755);
    for (unsigned l = 0; l < LEASES; l++) {
        snprintf(path, sizeof(path), "%s/leases/f%u", folder, l);
        mkdir(path, 0755);
        snprintf(path, sizeof(path), "%s/leases/f%u/" VGPU_LIMITS_FILE, folder, l);
        pages[l] = make_file(path);
        snprintf(path, sizeof(path), "%s/leases/f%u/" VGPU_USAGE_FILE, folder, l);
        usages[l] = make_file(path);
    }
    /* the second device has engine `cut`, with a control device that refuses every call */
    snprintf(path, sizeof(path), "%s/engines", folder);
    mkdir(path, 0755);
    snprintf(path, sizeof(path), "%s/engines/%s", folder, fresh_limits.devices[1].uuid);
    (void)!write(make_file(path), "cut", 3);
}

static void begin(void)
{
    char *words[] = {"vgpu-arbiter", "--run-dir", folder, "--foreground", "--control-device", "/dev/null", NULL};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int pair[2];
    if (mkdtemp(folder) == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        abort();
    make_leases();
    if (fork() == 0) {
        close(pair[0]);
        play_tenant(pair[1]);
    }
    close(pair[1]);
    tenant = pair[0];
    atexit(end);
    for (unsigned c = 0; c < CONNECTIONS; c++)
        connections[c] = -1;
    /* the arbiter logs each end of its loop; a sanitizer writes to its own file */
    freopen("/dev/null", "w", stderr);
    left = 0;
    arbiter_main(6, words);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/arbiter/control.sock", folder);
    control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connect(control, (struct sockaddr *)&address, sizeof(address)) != 0)
        abort();
}

static void tell(uint32_t kind, unsigned lease)
{
    struct vgpu_message message = {.kind = kind, .version = VGPU_LEASE_VERSION, .slot = VGPU_NO_SLOT};
    snprintf(message.allocation, sizeof(message.allocation), "f%u", lease);
    (void)!send(control, &message, sizeof(message), MSG_NOSIGNAL);
    loop_run();
    drain(control);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (tenant < 0)
        begin();
    for (unsigned l = 0; l < LEASES; l++) {
        (void)!ftruncate(usages[l], 0);
        (void)!ftruncate(usages[l], VGPU_USAGE_FILE_BYTES);
        (void)!pwrite(pages[l], &fresh_limits, sizeof(fresh_limits), 0);
    }
    ask_tenant(AGAIN, 0, 0);
    left = 0;
    for (unsigned l = 0; l < LEASES; l++)
        tell(VGPU_MSG_ADD, l);
    input = data;
    left = size;
    loop_run();
    for (unsigned c = 0; c < CONNECTIONS; c++) {
        if (connections[c] >= 0)
            close(connections[c]);
        connections[c] = -1;
    }
    for (unsigned l = 0; l < LEASES; l++)
        tell(VGPU_MSG_REMOVE, l);
    return 0;
}

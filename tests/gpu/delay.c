// A relay that adds a time to each direction of each connection, for machines whose kernel has no netem:
//
//     delay PORT NANOSECONDS
//
// It listens on a free port of the loopback address, which it prints, and connects to PORT.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHUNKS = 1024, CHUNK_BYTES = 65536 };

struct chunk {
    int64_t due_ns;
    ssize_t size;
    char bytes[CHUNK_BYTES];
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void send_all(int to, const char *bytes, ssize_t size)
{
    while (size > 0) {
        ssize_t sent = write(to, bytes, (size_t)size);
        if (sent <= 0)
            _exit(0);
        bytes += sent;
        size -= sent;
    }
}

// Passes each byte on `delay_ns` after it was read. Meanwhile the relay reads further bytes, as long as it has chunks.
static void pass(int from, int to, int64_t delay_ns)
{
    struct chunk *ring = malloc(CHUNKS * sizeof(*ring));
    unsigned first = 0, held = 0;
    int open = 1;
    if (!ring)
        _exit(1);
    while (open || held) {
        struct chunk *head = &ring[first % CHUNKS];
        struct pollfd ready = {.fd = open && held < CHUNKS ? from : -1, .events = POLLIN};
        int64_t left = held ? head->due_ns - now_ns() : 0;
        struct timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        if (held && left <= 0) {
            send_all(to, head->bytes, head->size);
            first++;
            held--;
            continue;
        }
        if (ppoll(&ready, 1, held ? &wait : NULL, NULL) > 0) {
            struct chunk *next = &ring[(first + held) % CHUNKS];
            next->size = read(from, next->bytes, CHUNK_BYTES);
            next->due_ns = now_ns() + delay_ns;
            if (next->size <= 0)
                open = 0;
            else
                held++;
        }
    }
    shutdown(to, SHUT_WR);
    _exit(0);
}

static int at_once(int made)
{
    int on = 1;
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return made;
}

int main(int argc, char **argv)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in other = own;
    socklen_t size = sizeof(own);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (argc != 3)
        return 2;
    other.sin_port = htons((uint16_t)atoi(argv[1]));
    prctl(PR_SET_TIMERSLACK, 1UL);
    signal(SIGCHLD, SIG_IGN);
    if (bind(listener, (struct sockaddr *)&own, size) || listen(listener, 128) ||
        getsockname(listener, (struct sockaddr *)&own, &size))
        return 1;
    printf("%d\n", ntohs(own.sin_port));
    fflush(stdout);
    for (;;) {
        int near = at_once(accept(listener, NULL, NULL)), far = at_once(socket(AF_INET, SOCK_STREAM, 0));
        if (near < 0 || connect(far, (struct sockaddr *)&other, sizeof(other)))
            return 1;
        for (int way = 0; way < 2; way++) {
            if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(listener);
                pass(way ? near : far, way ? far : near, atoll(argv[2]));
            }
        }
        close(near);
        close(far);
    }
}

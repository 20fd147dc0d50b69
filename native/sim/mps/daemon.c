/* The control daemon: its files, its sockets, the servers it starts, the clients it admits. */
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_LOG_DIRECTORY "/var/log/nvidia-mps"
#define MAX_CLIENTS_REACHED 808   /* CUDA_ERROR_MPS_MAX_CLIENTS_REACHED */
#define INVALID_CONFIGURATION 915 /* CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION */

static volatile sig_atomic_t g_child_died;

static void on_child(int signal_number)
{
    (void)signal_number;
    g_child_died = 1;
}

void daemon_log(struct daemon *d, const char *format, ...)
{
    char when[32];
    time_t now = time(NULL);
    struct tm tm;
    va_list args;
    if (d->log == NULL)
        return;
    strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", localtime_r(&now, &tm));
    fprintf(d->log, "[%s.000 Control %5d] ", when, getpid());
    va_start(args, format);
    vfprintf(d->log, format, args);
    va_end(args);
    fputc('\n', d->log);
    fflush(d->log);
}

static void path_of(const struct daemon *d, const char *name, char *out, size_t size)
{
    snprintf(out, size, "%s/%s", d->directory, name);
}

static bool make_directory(const char *path)
{
    char text[1024];
    snprintf(text, sizeof(text), "%s", path);
    for (char *p = text + 1; *p != '\0'; p++) {
        if (*p == '/') {
            *p = '\0';
            mkdir(text, 0755);
            *p = '/';
        }
    }
    return mkdir(text, 0755) == 0 || errno == EEXIST;
}

static int listen_at(const struct daemon *d, const char *name, mode_t mode)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", d->directory, name) >=
        (int)sizeof(address.sun_path))
        return -1;
    unlink(address.sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 || chmod(address.sun_path, mode) != 0 ||
        listen(fd, 128) != 0) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

static bool write_pid(const struct daemon *d)
{
    char path[256];
    path_of(d, MPS_CONTROL ".pid", path, sizeof(path));
    FILE *f = fopen(path, "we");
    if (f == NULL)
        return false;
    fprintf(f, "%d\n", getpid());
    return fclose(f) == 0;
}

static bool open_files(struct daemon *d)
{
    char path[2048];
    path_of(d, "log", path, sizeof(path));
    unlink(path);
    if (mkfifo(path, 0644) != 0)
        return false;
    if (make_directory(d->log_directory)) {
        snprintf(path, sizeof(path), "%s/server.log", d->log_directory);
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (fd >= 0)
            close(fd);
        snprintf(path, sizeof(path), "%s/control.log", d->log_directory);
        d->log = fopen(path, "ae");
    }
    d->control = listen_at(d, "control", 0666);
    d->privileged = listen_at(d, "control_privileged", 0755);
    return d->control >= 0 && d->privileged >= 0 && write_pid(d);
}

struct server *server_by_pid(struct daemon *d, pid_t pid)
{
    for (int i = 0; pid > 0 && i < MPS_MAX_SERVERS; i++)
        if (d->servers[i].pid == pid)
            return &d->servers[i];
    return NULL;
}

struct server *server_start(struct daemon *d, uid_t uid)
{
    struct server *s = NULL;
    for (int i = 0; i < MPS_MAX_SERVERS; i++) {
        if (d->servers[i].pid != 0 && (d->servers[i].uid == uid || d->multiuser))
            return &d->servers[i];
        if (s == NULL && d->servers[i].pid == 0)
            s = &d->servers[i];
    }
    if (s == NULL)
        return NULL;
    char control[16];
    snprintf(control, sizeof(control), "%d", getpid());
    pid_t pid = fork();
    if (pid == 0) {
        char *argv[] = {(char *)(uintptr_t)MPS_SERVER, control, NULL};
        signal(SIGCHLD, SIG_DFL);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    if (pid < 0)
        return NULL;
    *s = (struct server){.pid = pid, .uid = uid, .limits = d->defaults};
    daemon_log(d, "Starting new server %d for user %u", pid, uid);
    return s;
}

static void drop(struct connection *c)
{
    close(c->fd);
    memset(c, 0, sizeof(*c));
    c->fd = -1;
}

void server_stop(struct daemon *d, struct server *s)
{
    kill(s->pid, SIGTERM);
    waitpid(s->pid, NULL, 0);
    daemon_log(d, "Server %d exited", s->pid);
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        if (d->connections[i].peer == PEER_CLIENT && d->connections[i].server == s->pid)
            drop(&d->connections[i]);
    memset(s, 0, sizeof(*s));
}

void client_terminate(struct daemon *d, pid_t server, pid_t client)
{
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++) {
        struct connection *c = &d->connections[i];
        if (c->peer == PEER_CLIENT && c->server == server && c->pid == client) {
            (void)!write(c->fd, "T", 1);
            drop(c);
        }
    }
}

static void reap(struct daemon *d)
{
    pid_t pid;
    g_child_died = 0;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {
        struct server *s = server_by_pid(d, pid);
        if (s == NULL)
            continue;
        daemon_log(d, "Server %d exited with status 9", pid);
        for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
            if (d->connections[i].peer == PEER_CLIENT && d->connections[i].server == pid)
                drop(&d->connections[i]);
        memset(s, 0, sizeof(*s));
    }
}

static int count_clients(const struct daemon *d, uid_t uid, bool others)
{
    int n = 0;
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        n += d->connections[i].peer == PEER_CLIENT && (d->connections[i].uid == uid) != others;
    return n;
}

static void refuse(struct connection *c, int code)
{
    char line[32];
    snprintf(line, sizeof(line), "REFUSED %d\n", code);
    (void)!send(c->fd, line, strlen(line), MSG_NOSIGNAL);
    drop(c);
}

/*
 * Admits or refuses a client. Without multi-user mode, clients of another user wait until the running ones have ended.
 */
static void admit(struct daemon *d, struct connection *c)
{
    char limits[1536], devices[1024], line[4096];
    if (!d->multiuser && count_clients(d, c->uid, true) > 0)
        return;
    bool later = sim_branch(d->state) >= MPS_BRANCH_OF_PARTITIONS;
    if (count_clients(d, c->uid, false) >= (later ? MPS_MAX_CLIENTS_590 : MPS_MAX_CLIENTS)) {
        refuse(c, MAX_CLIENTS_REACHED);
        return;
    }
    for (int i = 0; !d->multiuser && i < MPS_MAX_SERVERS; i++)
        if (d->servers[i].pid != 0 && d->servers[i].uid != c->uid)
            server_stop(d, &d->servers[i]);
    struct server *s = server_start(d, c->uid);
    if (s == NULL) {
        drop(c);
        return;
    }
    double percent = s->limits.thread_percentage;
    if (d->static_partitions && (percent = partitions_percent(d, c, c->named)) == 0) {
        refuse(c, INVALID_CONFIGURATION);
        return;
    }
    limits_for_client(&s->limits, d->state, limits, sizeof(limits));
    limits_devices(d->state, devices, sizeof(devices));
    snprintf(line, sizeof(line), "%s %g %s %s\n", d->static_partitions ? "FIXED" : "OK", percent, devices, limits);
    c->peer = PEER_CLIENT;
    c->server = s->pid;
    daemon_log(d, "NEW CLIENT %d from user %u: Server already exists", c->pid, c->uid);
    if (send(c->fd, line, strlen(line), MSG_NOSIGNAL) < 0)
        drop(c);
}

static void answer(struct daemon *d, struct connection *c)
{
    char reply[16384], head[32];
    if (strncmp(c->line, "HELLO ", 6) == 0) {
        sscanf(c->line, "HELLO %*d %127s", c->named);
        c->peer = PEER_WAITING;
        admit(d, c);
        return;
    }
    c->peer = PEER_COMMAND;
    d->command(d, c, c->line, reply, sizeof(reply));
    int n = snprintf(head, sizeof(head), "%zu\n", strlen(reply));
    if (send(c->fd, head, (size_t)n, MSG_NOSIGNAL) < 0 || send(c->fd, reply, strlen(reply), MSG_NOSIGNAL) < 0)
        drop(c);
}

static void receive(struct daemon *d, struct connection *c)
{
    ssize_t n = recv(c->fd, c->line + c->used, sizeof(c->line) - 1 - c->used, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0 || c->used + (size_t)n >= sizeof(c->line) - 1) {
        drop(c);
        return;
    }
    c->used += (size_t)n;
    c->line[c->used] = '\0';
    char *end;
    while (c->fd >= 0 && !d->stopping && (end = strchr(c->line, '\n')) != NULL) {
        char rest[sizeof(c->line)];
        snprintf(rest, sizeof(rest), "%s", end + 1);
        *end = '\0';
        answer(d, c);
        if (c->fd >= 0) {
            memcpy(c->line, rest, sizeof(rest));
            c->used = strlen(rest);
        }
    }
}

static void accept_from(struct daemon *d, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    struct ucred who;
    socklen_t size = sizeof(who);
    if (fd < 0)
        return;
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++) {
        struct connection *c = &d->connections[i];
        if (c->fd >= 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0)
            continue;
        *c = (struct connection){.fd = fd, .peer = PEER_NEW, .pid = who.pid, .uid = who.uid};
        return;
    }
    close(fd);
}

static void serve_once(struct daemon *d)
{
    struct pollfd fds[MPS_MAX_CONNECTIONS + 2] = {{d->control, POLLIN, 0}, {d->privileged, POLLIN, 0}};
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        fds[i + 2] = (struct pollfd){d->connections[i].fd, POLLIN, 0};
    if (poll(fds, MPS_MAX_CONNECTIONS + 2, g_child_died ? 0 : 500) < 0 && errno != EINTR)
        return;
    if (g_child_died)
        reap(d);
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        if (d->connections[i].fd >= 0 && fds[i + 2].fd == d->connections[i].fd && fds[i + 2].revents)
            receive(d, &d->connections[i]);
    for (int i = 0; i < 2; i++)
        if (fds[i].revents)
            accept_from(d, fds[i].fd);
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        if (d->connections[i].peer == PEER_WAITING)
            admit(d, &d->connections[i]);
}

static int serve(struct daemon *d)
{
    char path[256];
    struct sigaction on_death = {.sa_handler = on_child};
    sigaction(SIGCHLD, &on_death, NULL);
    signal(SIGPIPE, SIG_IGN);
    daemon_log(d, "Starting control daemon using socket %s/control", d->directory);
    daemon_log(d, "Accepting connection...");
    while (!d->stopping)
        serve_once(d);
    for (int i = 0; i < MPS_MAX_SERVERS; i++)
        if (d->servers[i].pid != 0)
            server_stop(d, &d->servers[i]);
    path_of(d, MPS_CONTROL ".pid", path, sizeof(path));
    unlink(path); /* the sockets and the lock stay, as NVIDIA's daemon leaves them */
    path_of(d, "log", path, sizeof(path));
    unlink(path);
    daemon_log(d, "Exit");
    return 0;
}

/* Returns 0 in the parent when the daemon is up, 1 if it failed, and -1 in the child, which goes on as the daemon. */
static int go_background(int *ready)
{
    int ends[2];
    char byte;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return 1;
    pid_t pid = fork();
    if (pid < 0)
        return 1;
    if (pid > 0) {
        close(ends[1]);
        waitpid(pid, NULL, 0);
        return read(ends[0], &byte, 1) == 1 ? 0 : 1;
    }
    close(ends[0]);
    setsid();
    if (fork() != 0)
        _exit(0);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3 && null >= 0; fd++)
        dup2(null, fd);
    *ready = ends[1];
    return -1;
}

int daemon_run(bool background, bool multiuser, bool static_partitions, daemon_command command)
{
    static struct daemon d;
    char path[256];
    const char *log = getenv("CUDA_MPS_LOG_DIRECTORY");
    int ready = -1;
    d.state = sim_attach();
    if (d.state == NULL)
        return 244; /* exits as branch 580 does without libcuda: no output, no log */
    if (snprintf(d.directory, sizeof(d.directory) - 20, "%s", pipe_directory()) >= (int)sizeof(d.directory) - 20) {
        fprintf(stderr, "The path of the MPS pipe directory is too long\n");
        return 1;
    }
    snprintf(d.log_directory, sizeof(d.log_directory), "%s", log ? log : DEFAULT_LOG_DIRECTORY);
    d.multiuser = multiuser;
    d.static_partitions = static_partitions;
    d.command = command;
    limits_init(&d.defaults);
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        d.connections[i].fd = -1;
    if (!make_directory(d.directory)) {
        fprintf(stderr, "Cannot create %s: %s\n", d.directory, strerror(errno));
        return 1;
    }
    path_of(&d, "control_lock", path, sizeof(path));
    d.lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (d.lock < 0 || flock(d.lock, LOCK_EX | LOCK_NB) != 0) {
        fprintf(stderr, "An instance of this daemon is already running\n");
        return 1;
    }
    if (background) {
        int rc = go_background(&ready);
        if (rc >= 0)
            return rc;
    }
    if (!open_files(&d))
        return 1;
    if (ready >= 0) {
        (void)!write(ready, "y", 1);
        close(ready);
    }
    return serve(&d);
}

/* The commands of the control daemon. A refusal is a sentence in the reply; the status stays 0. */
#include "mps.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct reply {
    char *text;
    size_t size, used;
};

__attribute__((format(printf, 2, 3))) static void say(struct reply *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(r->text + r->used, r->size - r->used, format, args);
    va_end(args);
    if (n > 0)
        r->used += (size_t)n < r->size - r->used ? (size_t)n : r->size - r->used - 1;
}

/*
 * The users that may give a command: all users, or the daemon's own user and root. For a command that names a server,
 * the user's right is checked only if that server exists.
 */
enum right { ANY_USER, OWNER, OWNER_OF_SERVER };

struct command {
    const char *name;
    enum right right;
    void (*run)(struct daemon *d, char **words, int count, struct reply *r);
};

static struct server *find_server(struct daemon *d, const char *word, struct reply *r)
{
    pid_t pid = word == NULL ? 0 : (pid_t)atol(word);
    struct server *s = server_by_pid(d, pid);
    if (s == NULL)
        say(r, "Server %d not found\n", pid);
    return s;
}

static void get_server_list(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)words;
    (void)count;
    for (int i = 0; i < MPS_MAX_SERVERS; i++)
        if (d->servers[i].pid != 0)
            say(r, "%d\n", d->servers[i].pid);
}

static void start_server(struct daemon *d, char **words, int count, struct reply *r)
{
    if (count >= 3 && strcmp(words[1], "-uid") == 0)
        server_start(d, (uid_t)atol(words[2]));
    else
        say(r, "A user id (UID) is required to start a new server\n");
}

static void shutdown_server(struct daemon *d, char **words, int count, struct reply *r)
{
    struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    if (s != NULL)
        server_stop(d, s);
}

static void get_client_list(struct daemon *d, char **words, int count, struct reply *r)
{
    const struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    for (int i = 0; s != NULL && i < MPS_MAX_CONNECTIONS; i++)
        if (d->connections[i].peer == PEER_CLIENT && d->connections[i].server == s->pid)
            say(r, "%d\n", d->connections[i].pid);
}

static void get_default_percentage(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)words;
    (void)count;
    say(r, "%.1f\n", d->defaults.thread_percentage);
}

static void set_default_percentage(struct daemon *d, char **words, int count, struct reply *r)
{
    if (count > 1)
        limits_set_percentage(&d->defaults, words[1]);
    get_default_percentage(d, words, count, r);
}

static void get_percentage(struct daemon *d, char **words, int count, struct reply *r)
{
    const struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    if (s != NULL)
        say(r, "%.1f\n", s->limits.thread_percentage);
}

static void set_percentage(struct daemon *d, char **words, int count, struct reply *r)
{
    struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    if (s == NULL)
        return;
    if (count > 2)
        limits_set_percentage(&s->limits, words[2]);
    say(r, "%.1f\n", s->limits.thread_percentage);
}

static void print_memory(const struct limits *l, const char *device, struct reply *r)
{
    char text[64];
    limits_print_memory(l, device, text, sizeof(text));
    say(r, "%s", text);
}

static void get_default_memory(struct daemon *d, char **words, int count, struct reply *r)
{
    if (count > 1)
        print_memory(&d->defaults, words[1], r);
}

static void set_default_memory(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)r;
    if (count > 2)
        limits_set_memory(&d->defaults, words[1], words[2]);
}

static void get_memory(struct daemon *d, char **words, int count, struct reply *r)
{
    const struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    if (s != NULL && count > 2)
        print_memory(&s->limits, words[2], r);
}

static void set_memory(struct daemon *d, char **words, int count, struct reply *r)
{
    struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
    if (s != NULL && count > 3)
        limits_set_memory(&s->limits, words[2], words[3]);
}

static void get_default_priority(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)words;
    (void)count;
    say(r, "%d\n", d->defaults.priority);
}

static void set_default_priority(struct daemon *d, char **words, int count, struct reply *r)
{
    const char *text = count > 1 ? words[1] : "";
    if (count < 2)
        return;
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        say(r, "Invalid priority value - must be 0 or 1!\n");
    else
        d->defaults.priority = text[0] - '0';
}

static void terminate_client(struct daemon *d, char **words, int count, struct reply *r)
{
    pid_t server = count > 1 ? (pid_t)atol(words[1]) : 0;
    if (find_server(d, count > 1 ? words[1] : NULL, r) == NULL)
        say(r, "Server %d not found!\n1\n", server);
    else if (count > 2)
        client_terminate(d, server, (pid_t)atol(words[2]));
}

static void get_server_status(struct daemon *d, char **words, int count, struct reply *r)
{
    if (count < 2) {
        say(r, "A server PID is required\n");
        return;
    }
    const struct server *s = find_server(d, words[1], r);
    if (s != NULL)
        say(r, "%s\n", s->fault ? "FAULT" : "ACTIVE");
}

static void print_device(struct daemon *d, pid_t pid, struct reply *r)
{
    for (uint32_t i = 0; i < SIM_MAX_PROCS; i++) {
        const struct sim_proc *p = &d->state->procs[i];
        if (!atomic_load(&p->used) || p->pid != (uint32_t)pid)
            continue;
        for (uint32_t j = 0; j < SIM_MAX_USES; j++) {
            if (p->uses[j].used) {
                say(r, "%s", d->state->devices[p->uses[j].device].uuid);
                return;
            }
        }
    }
    say(r, "-");
}

static bool any_server(const struct daemon *d)
{
    bool any = false;
    for (int i = 0; i < MPS_MAX_SERVERS; i++)
        any = any || d->servers[i].pid != 0;
    return any;
}

static void ps(struct daemon *d, char **words, int count, struct reply *r)
{
    pid_t only = count > 2 && strcmp(words[1], "-p") == 0 ? (pid_t)atol(words[2]) : 0;
    if (only != 0 && find_server(d, words[2], r) == NULL) {
        say(r, "Server %d not found\n\n", only);
        return;
    }
    if (!any_server(d)) {
        say(r, "Server not found\n");
        return;
    }
    say(r, "PID       ID       SERVER    DEVICE                                    NAMESPACE    "
           "COMMAND\n");
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++) {
        const struct connection *c = &d->connections[i];
        char path[64], name[64] = "?";
        if (c->peer != PEER_CLIENT || (only != 0 && c->server != only))
            continue;
        snprintf(path, sizeof(path), "/proc/%d/comm", c->pid);
        FILE *f = fopen(path, "re");
        if (f != NULL) {
            if (fgets(name, sizeof(name), f) != NULL)
                name[strcspn(name, "\n")] = '\0';
            fclose(f);
        }
        say(r, "%-9d %-8d %-9d ", c->pid, i, c->server);
        print_device(d, c->pid, r);
        say(r, "  %d  %s\n", c->pid, name);
    }
}

/* The layout of NVIDIA's lines is not known; this prints a device and its clients. */
static void get_device_client_list(struct daemon *d, char **words, int count, struct reply *r)
{
    const struct server *only = count > 1 ? find_server(d, words[1], r) : NULL;
    for (int i = 0; (count < 2 || only != NULL) && i < MPS_MAX_CONNECTIONS; i++) {
        const struct connection *c = &d->connections[i];
        if (c->peer != PEER_CLIENT || (only != NULL && c->server != only->pid))
            continue;
        print_device(d, c->pid, r);
        say(r, " %d\n", c->pid);
    }
}

static void device_query(struct daemon *d, char **words, int count, struct reply *r)
{
    bool csv = count > 1 && strcmp(words[count - 1], "--csv") == 0;
    say(r, csv ? "Device Ordinal,UUID,Name\n" : "Device Ordinal  UUID                                      Name\n");
    for (uint32_t i = 0; i < d->state->device_count; i++)
        say(r, csv ? "%u,%s,%s\n" : "%-15u %s  %s\n", i, d->state->devices[i].uuid, d->state->devices[i].name);
}

static void sm_partition(struct daemon *d, char **words, int count, struct reply *r)
{
    char text[256];
    if (!d->static_partitions || count < 4)
        say(r, "Static partitioning is not enabled\n");
    else if (strcmp(words[1], "add") == 0)
        partitions_add(d, words[2], (uint32_t)strtoul(words[3], NULL, 10), text, sizeof(text));
    else
        partitions_remove(d, words[3], text, sizeof(text));
    if (d->static_partitions && count >= 4)
        say(r, "%s", text);
}

static void lspart(struct daemon *d, char **words, int count, struct reply *r)
{
    char text[8192] = "";
    (void)words;
    (void)count;
    if (d->static_partitions)
        partitions_print(d, text, sizeof(text));
    say(r, "%s", text);
}

static void quit(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)words;
    (void)count;
    (void)r;
    d->stopping = true;
}

static const struct command commands[] = {
    {"get_server_list", ANY_USER, get_server_list},
    {"start_server", ANY_USER, start_server},
    {"shutdown_server", OWNER_OF_SERVER, shutdown_server},
    {"get_client_list", ANY_USER, get_client_list},
    {"get_default_active_thread_percentage", ANY_USER, get_default_percentage},
    {"set_default_active_thread_percentage", OWNER, set_default_percentage},
    {"get_active_thread_percentage", ANY_USER, get_percentage},
    {"set_active_thread_percentage", OWNER_OF_SERVER, set_percentage},
    {"get_default_device_pinned_mem_limit", ANY_USER, get_default_memory},
    {"set_default_device_pinned_mem_limit", OWNER, set_default_memory},
    {"get_device_pinned_mem_limit", ANY_USER, get_memory},
    {"set_device_pinned_mem_limit", OWNER_OF_SERVER, set_memory},
    {"get_default_client_priority", ANY_USER, get_default_priority},
    {"set_default_client_priority", OWNER, set_default_priority},
    {"terminate_client", OWNER_OF_SERVER, terminate_client},
    {"get_server_status", ANY_USER, get_server_status},
    {"ps", ANY_USER, ps},
    {"get_device_client_list", ANY_USER, get_device_client_list},
    {"device_query", ANY_USER, device_query},
    {"sm_partition", OWNER, sm_partition},
    {"lspart", ANY_USER, lspart},
    {"quit", OWNER, quit},
};

static int split(char *line, char **words, int most)
{
    int count = 0;
    char *word;
    while (count < most && (word = strsep(&line, " \t")) != NULL)
        if (*word != '\0')
            words[count++] = word;
    return count;
}

void command_run(struct daemon *d, const struct connection *from, char *line, char *out, size_t size)
{
    struct reply r = {out, size, 0};
    char *words[8];
    int count = split(line, words, 8);
    out[0] = '\0';
    if (count == 0)
        return;
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(words[0], commands[i].name) != 0)
            continue;
        bool owner = from->uid == 0 || from->uid == geteuid();
        bool named = count > 1 && server_by_pid(d, (pid_t)atol(words[1])) != NULL;
        if (owner || commands[i].right == ANY_USER || (commands[i].right == OWNER_OF_SERVER && !named))
            commands[i].run(d, words, count, &r);
        else if (strcmp(words[0], "quit") == 0)
            say(&r, "Not enough privilege to execute quit command\n");
        else
            say(&r,
                "Insufficient privileges for UID %u. Control deamon settings can only be modified by the user "
                "started it or by the root user.\n",
                from->uid);
        return;
    }
    say(&r, "Unknown command \"%s\"\n", words[0]);
}

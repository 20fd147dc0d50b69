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

struct command {
    const char *name;
    bool privileged;
    void (*run)(struct daemon *d, char **words, int count, struct reply *r);
};

static struct server *find_server(struct daemon *d, const char *word, struct reply *r)
{
    struct server *s = word == NULL ? NULL : server_by_pid(d, (pid_t)atol(word));
    if (s == NULL)
        say(r, "Server %s not found\n", word == NULL ? "" : word);
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
    (void)r;
    if (count >= 3 && strcmp(words[1], "-uid") == 0)
        server_start(d, (uid_t)atol(words[2]));
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
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        say(r, "Invalid priority value - must be 0 or 1!\n");
    else
        d->defaults.priority = text[0] - '0';
}

static void terminate_client(struct daemon *d, char **words, int count, struct reply *r)
{
    if (count > 2 && find_server(d, words[1], r) != NULL)
        client_terminate(d, (pid_t)atol(words[1]), (pid_t)atol(words[2]));
}

static void get_server_status(struct daemon *d, char **words, int count, struct reply *r)
{
    const struct server *s = find_server(d, count > 1 ? words[1] : NULL, r);
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

static void ps(struct daemon *d, char **words, int count, struct reply *r)
{
    pid_t only = count > 2 && strcmp(words[1], "-p") == 0 ? (pid_t)atol(words[2]) : 0;
    say(r, "PID       ID       SERVER    DEVICE                                    NAMESPACE    "
           "COMMAND\n");
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++) {
        const struct connection *c = &d->connections[i];
        char path[64], name[64] = "?";
        if (c->peer != PEER_CLIENT || (only != 0 && c->pid != only))
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

static void device_query(struct daemon *d, char **words, int count, struct reply *r)
{
    bool csv = count > 1 && strcmp(words[count - 1], "--csv") == 0;
    say(r, csv ? "Device Ordinal,UUID,Name\n" : "Device Ordinal  UUID                                      Name\n");
    for (uint32_t i = 0; i < d->state->device_count; i++)
        say(r, csv ? "%u,%s,%s\n" : "%-15u %s  %s\n", i, d->state->devices[i].uuid,
            d->state->devices[i].name);
}

static void quit(struct daemon *d, char **words, int count, struct reply *r)
{
    (void)words;
    (void)count;
    (void)r;
    d->stopping = true;
}

static const struct command commands[] = {
    {"get_server_list", false, get_server_list},
    {"start_server", true, start_server},
    {"shutdown_server", true, shutdown_server},
    {"get_client_list", false, get_client_list},
    {"get_default_active_thread_percentage", false, get_default_percentage},
    {"set_default_active_thread_percentage", true, set_default_percentage},
    {"get_active_thread_percentage", false, get_percentage},
    {"set_active_thread_percentage", true, set_percentage},
    {"get_default_device_pinned_mem_limit", false, get_default_memory},
    {"set_default_device_pinned_mem_limit", true, set_default_memory},
    {"get_device_pinned_mem_limit", false, get_memory},
    {"set_device_pinned_mem_limit", true, set_memory},
    {"get_default_client_priority", false, get_default_priority},
    {"set_default_client_priority", true, set_default_priority},
    {"terminate_client", true, terminate_client},
    {"get_server_status", false, get_server_status},
    {"ps", false, ps},
    {"device_query", false, device_query},
    {"quit", true, quit},
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
        if (!commands[i].privileged || from->uid == 0 || from->uid == geteuid())
            commands[i].run(d, words, count, &r);
        else if (strcmp(words[0], "quit") == 0)
            say(&r, "Not enough privilege to execute quit command\n");
        else
            say(&r, "Insufficient privileges for UID %u\n", from->uid);
        return;
    }
    say(&r, "Unrecognized command \"%s\"\n", words[0]);
}

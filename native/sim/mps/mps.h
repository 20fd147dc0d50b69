/*
 * A stand-in for nvidia-cuda-mps-control and -server: the same commands, files, replies and errors, as measured on
 * branches 550 and 580. It shares no GPU; the simulated libcuda asks it for limits.
 */
#ifndef VGPU_SIM_MPS_H
#define VGPU_SIM_MPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "../state/state.h"

/* The first branch with static partitions and 60 clients (MPS guide: CUDA 13.1). */
enum { MPS_BRANCH_OF_PARTITIONS = 590 };
enum { MPS_MAX_LIMITS = 32, MPS_MAX_SERVERS = 16, MPS_MAX_CONNECTIONS = 256, MPS_MAX_PARTITIONS = 32 };
enum { MPS_MAX_CLIENTS = 48, MPS_MAX_CLIENTS_590 = 60 };
#define MPS_CONTROL "nvidia-cuda-mps-control"
#define MPS_SERVER "nvidia-cuda-mps-server"

/* Pinned memory limits, by the key they were set with: an ordinal and a UUID are different keys. */
struct limit {
    char device[64];
    uint64_t bytes; /* 0: unlimited */
};
struct limits {
    double thread_percentage;
    int priority;
    uint32_t count;
    struct limit memory[MPS_MAX_LIMITS];
};

struct server {
    pid_t pid;
    uid_t uid;
    struct limits limits; /* a copy of the defaults when the server started */
    bool fault;
};

/* A part of the device's SMs that only clients that name it can use. */
struct partition {
    char id[24];
    uint32_t chunks; /* 0: the entry is free */
};

enum peer { PEER_NEW, PEER_COMMAND, PEER_WAITING, PEER_CLIENT };

struct connection {
    int fd;
    enum peer peer;
    pid_t pid;
    uid_t uid;
    pid_t server; /* pid of the server that serves this client */
    const struct partition *partition;
    char line[1024], named[128]; /* `named`: the partition that the client names */
    size_t used;
};

struct daemon;

/* Writes the reply to one command line, which it may change. */
typedef void (*daemon_command)(struct daemon *d, const struct connection *from, char *line, char *out, size_t size);

struct daemon {
    char directory[108], log_directory[1024];
    int control, privileged, lock;
    FILE *log;
    bool multiuser, static_partitions, stopping;
    struct partition partitions[MPS_MAX_PARTITIONS];
    uint32_t partitions_made;
    struct limits defaults;
    struct server servers[MPS_MAX_SERVERS];
    struct connection connections[MPS_MAX_CONNECTIONS];
    struct sim_state *state;
    daemon_command command;
};

/* Functions of limits.c. */
void limits_init(struct limits *l);
void limits_set_percentage(struct limits *l, const char *text); /* an invalid value changes nothing */
void limits_set_memory(struct limits *l, const char *device, const char *text);
void limits_print_memory(const struct limits *l, const char *device, char *out, size_t size);
/* Writes the devices that clients see: "*" (all), "-" (nothing), or UUIDs in the daemon's order. */
void limits_devices(const struct sim_state *s, char *out, size_t size);
/*
 * Writes the memory limits of a client as "GPU-uuid=BYTES,...". A limit set by ordinal counts the devices that the
 * daemon sees.
 */
void limits_for_client(const struct limits *l, const struct sim_state *s, char *out, size_t size);

/* Functions of partitions.c. */
void partitions_add(struct daemon *d, const char *uuid, uint32_t chunks, char *out, size_t size);
void partitions_remove(struct daemon *d, const char *id, char *out, size_t size);
void partitions_print(const struct daemon *d, char *out, size_t size);
/* Puts a client into the partition that it names. Returns the percentage of the device's SMs; 0 if there is none. */
double partitions_percent(struct daemon *d, struct connection *c, const char *named);

/* Functions of daemon.c. */
int daemon_run(bool background, bool multiuser, bool static_partitions, daemon_command command);
void daemon_log(struct daemon *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
struct server *server_start(struct daemon *d, uid_t uid);
struct server *server_by_pid(struct daemon *d, pid_t pid);
void server_stop(struct daemon *d, struct server *s);
void client_terminate(struct daemon *d, pid_t server, pid_t client);

/* Function of commands.c: a daemon_command. */
void command_run(struct daemon *d, const struct connection *from, char *line, char *out, size_t size);

/* Functions of client.c. */
int control_shell(void); /* reads commands on standard input, prints replies on standard output */
/* `control` is the parent's pid, because the parent may have ended before the child calls getppid() */
int server_main(pid_t control);
const char *pipe_directory(void);

#endif

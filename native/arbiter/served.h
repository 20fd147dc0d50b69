/* served.h: the leases that the arbiter serves, their sockets and their live processes. */
#ifndef ARBITER_SERVED_H
#define ARBITER_SERVED_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "lease.h"
#include "loop.h"
#include "rate.h"
#include "scheduler.h"

struct lease;

/* A registered process: its life is watched through its pidfd. */
struct process {
    struct source pidfd;
    struct lease *lease;
    struct process *next;
    int32_t pid; /* in the arbiter's pid namespace */
    uint32_t slot;
    uint32_t owner;
    bool left; /* its connection has ended, and it still held its lock then */
};

struct connection {
    struct source socket;
    struct lease *lease;
    struct connection *next;
    struct sched_member member;
    bool joined;    /* the member is the lease's */
    int pidfd;      /* of the process that connected (identity.h), until it has registered: then -1 */
    pid_t pid;      /* its number while it lives */
    uint32_t owner; /* registration number of the process that it registered; 0: none yet */
    bool watches;   /* cut: it was told to say when it idles */
    uint32_t slot;  /* of its process */
};

struct lease {
    struct source listener;
    struct lease *next_cut;       /* of those whose turns are kept by the engine cut */
    struct cut_place *cut_places; /* one a device; NULL: they are kept by the tenant's gate */
    struct lease *next;
    struct process *processes;
    struct connection *connections;
    uint32_t connection_count;
    uint32_t holds; /* connections, processes and calls that need the files below */
    int limits_fd;  /* -1 while nothing holds them: an idle lease costs one descriptor, its socket's */
    int usage_fd;
    dev_t usage_device; /* of the file that was there when the lease was added */
    ino_t usage_inode;
    uid_t owner;      /* whom the lease is for: the file's owner */
    bool anyone;      /* it is written by any user that reaches it: a container's */
    int watch;        /* of usage_fd, see bound.h */
    uint32_t cuts;    /* how often `usage` was longer, or took more room, than it may */
    struct rate rate; /* see rest.h */
    bool resting;
    bool shut;       /* its locks are not looked at any more */
    bool look_later; /* processes that have left (process.h) are to be looked at again */
    bool ticks;
    struct lease *ticking_next;
    struct sched_tenant tenant;
    bool schedules; /* the tenant is known to sched */
    bool touched;   /* its counters are to be published */
    bool away;      /* VGPU_LEASE_AWAY, as of the last look at its limits */
    struct lease *touched_next;
    uint64_t generation; /* of the limits that sched knows */
    char id[VGPU_ID_BYTES];
};

/* May this name a folder under leases/? Letters, digits, '.', '_' and '-', no leading dot. */
bool lease_id_valid(const char id[VGPU_ID_BYTES]);

/* Serves leases/<id>: opens its files without following links, binds its socket, clears the slots of
 * the dead and adopts the living. Again for a served lease: rebinds if the folder is a new one. 0 or -errno. */
int lease_add(int leases_fd, const char *id);

/* Opens the lease's files if they are not: the same ones as when it was added. False: they are gone. */
bool lease_hold(struct lease *lease);
void lease_release(struct lease *lease);

/* Stops serving; processes and the folder are left alone. 0 or -ENOENT. */
int lease_remove(const char *id);

/* Says LOOK to its processes; 0 or -ENOENT. */
int lease_look(const char *id);

/* Fills `list`; 0 or -ENOENT. */
int lease_list(const char *id, struct vgpu_process_list *list);

/* The lease whose `usage` has this watch (bound.h), or NULL. */
struct lease *lease_by_watch(int watch);

/* Calls `visit` for each lease that is served; it must not remove one. */
void lease_each(void (*visit)(struct lease *lease));

/* Serves everything under leases/ (at start). Returns how many could not be served. */
int lease_scan(int leases_fd);

#endif

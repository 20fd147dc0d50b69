/* leases.h: the records of the leases that the arbiter serves, with their open files. One thread. */
#ifndef ARBITER_LEASES_H
#define ARBITER_LEASES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "identity.h"
#include "lease.h"
#include "loop.h"
#include "rate.h"
#include "scheduler.h"

struct lease;

/* Reasons for a look at a registered process, the stronger reason last. */
enum process_look {
    PROCESS_NONE,
    PROCESS_LEFT,  /* its connection has ended */
    PROCESS_MOVED, /* it has registered for another slot */
    PROCESS_ENDED,
};

/* A registered process; its pidfd reports its end. */
struct process {
    struct source pidfd;
    struct lease *lease;
    struct process *next;
    int32_t pid; /* in the arbiter's pid namespace */
    uint32_t slot;
    uint32_t owner;
    struct identity_image image; /* at registration */
    enum process_look due;       /* the strongest reason for a look that is queued */
    bool left;                   /* its connection has ended, and it held its lock at that time */
};

struct connection {
    struct source socket;
    struct lease *lease;
    struct connection *next;
    struct sched_member member;
    bool joined;    /* the scheduler has the member */
    int pidfd;      /* the process that connected (identity.h), until it has registered: then -1 */
    pid_t pid;      /* its pid, valid while it lives */
    uint32_t owner; /* registration number of the process that it registered; 0: none yet */
    uint32_t watch; /* engine cut: what it was told to report, enum vgpu_turn_flags */
    uint32_t slot;  /* the slot of its process */
    bool works;     /* engine cut: its last message was WANT, not DONE */
};

struct lease {
    struct source listener;
    struct lease *next_cut;          /* list of the leases with the engine cut */
    struct cut_entity *cut_entities; /* one for each device; NULL: the tenant's gate enforces its slices */
    struct lease *next;
    struct process *processes;
    struct connection *connections;
    uint32_t connection_count;
    uint32_t holds; /* connections, processes and calls that need the files below */
    int limits_fd;  /* -1 while nothing holds them: an idle lease costs one descriptor, its socket's */
    int usage_fd;
    dev_t usage_device; /* identity of the file at the time when the lease was added */
    ino_t usage_inode;
    uid_t owner;      /* the lease's uid: the file's owner */
    bool anyone;      /* any user that reaches it may write it: a container's lease */
    int watch;        /* inotify watch of usage_fd, see usage_guard.h */
    uint32_t cuts;    /* how often `usage` was longer, or used more blocks, than allowed */
    struct rate rate; /* see rest.h */
    bool resting;
    uint32_t long_looks;              /* expensive looks at its locks in a row */
    bool shut;                        /* its locks are no longer looked at, and its files stay open */
    bool look_later;                  /* the next tick looks at disconnected processes and at claimed slots */
    uint8_t unlocked[VGPU_MAX_SLOTS]; /* looks in a row that found the claimed slot without a lock */
    bool look_due;                    /* see looks.h */
    STAILQ_ENTRY(lease) next_due;
    bool ticks;
    struct lease *ticking_next;
    struct sched_tenant tenant;
    bool schedules;          /* the scheduler has the tenant */
    bool touched;            /* its counters must be published */
    bool refused;            /* the driver refused to preempt it: its gate enforces its slices */
    uint32_t refused_status; /* the driver's status; 0: errno is set instead */
    int refused_errno;
    bool suspended; /* VGPU_LEASE_SUSPENDED at the last look at its limits */
    bool paused;    /* and whether it is to be off its devices; false while it is suspended, which needs its channels */
    struct lease *touched_next;
    uint64_t generation; /* of the limits that the scheduler has */
    char id[VGPU_ID_BYTES];
};

/* Sets the folder leases/. The caller keeps the descriptor. Call once, before any other function here. */
void leases_open(int leases_fd);

/* Adds a lease to the list of served leases, or removes it. The caller owns the lease. */
void lease_link(struct lease *lease);
void lease_unlink(struct lease *lease);

/* The linked lease of this name, or NULL. */
struct lease *lease_find(const char *id);

/* The linked lease whose `usage` has this watch (usage_guard.h), or NULL. */
struct lease *lease_by_watch(int watch);

/* Calls `visit` for each linked lease; it must not unlink one. */
void lease_each(void (*visit)(struct lease *lease));

/* A descriptor of the folder with the entries of leases/<id>, which the caller closes, or -errno. No link is followed. */
int lease_open_folder(const char *id);

/*
 * Opens `limits` and `usage` without following links, and sets *usage to the status of `usage`. Precondition: they are
 * not open. Returns 0 or -errno; on failure both are closed again.
 */
int lease_open_files(int folder_fd, struct lease *lease, struct stat *usage);
uint64_t lease_close_files(struct lease *lease); /* returns how long that took, see aside.h */

/* Opens `usage` for reading; closing this descriptor causes no event in usage_guard.h. A descriptor, or -errno (-ESTALE if
 * the file is not the one that the lease was added with). */
int lease_open_to_read(const struct lease *lease);

/*
 * Keeps the lease's files open until the matching lease_release; the first hold opens them. False: they cannot be
 * opened, or are not those that the lease was added with; then nothing is held.
 */
bool lease_hold(struct lease *lease);
void lease_release(struct lease *lease);

#endif

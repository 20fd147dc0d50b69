/* leases.h: the records of the leases that the arbiter serves, and their open files. One thread. */
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

/* Why a registered process is to be looked at, the stronger reason last. */
enum process_look {
    PROCESS_NONE,
    PROCESS_LEFT,  /* its connection has ended */
    PROCESS_MOVED, /* it has registered for another slot */
    PROCESS_ENDED,
};

/* A registered process: its life is watched through its pidfd. */
struct process {
    struct source pidfd;
    struct lease *lease;
    struct process *next;
    int32_t pid; /* in the arbiter's pid namespace */
    uint32_t slot;
    uint32_t owner;
    struct identity_image image; /* as it registered */
    enum process_look due;       /* the strongest reason for a look that is queued */
    bool left;                   /* its connection has ended, and it still held its lock then */
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
    uint32_t watch; /* cut: what it was told to say, enum vgpu_turn_flags */
    uint32_t slot;  /* of its process */
};

struct lease {
    struct source listener;
    struct lease *next_cut;          /* of those whose turns are kept by the engine cut */
    struct cut_entity *cut_entities; /* one a device; NULL: they are kept by the tenant's gate */
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
    int watch;        /* of usage_fd, see usage_guard.h */
    uint32_t cuts;    /* how often `usage` was longer, or took more room, than it may */
    struct rate rate; /* see rest.h */
    bool resting;
    uint32_t long_looks;              /* at its locks, one after the other */
    bool shut;                        /* its locks are not looked at any more, and its files stay open */
    bool look_later;                  /* the next tick looks at disconnected processes and at claimed slots */
    uint8_t unlocked[VGPU_MAX_SLOTS]; /* looks in a row that found the claimed slot without a lock */
    bool look_due;                    /* see looks.h */
    STAILQ_ENTRY(lease) next_due;
    bool ticks;
    struct lease *ticking_next;
    struct sched_tenant tenant;
    bool schedules; /* the tenant is known to sched */
    bool touched;   /* its counters are to be published */
    bool refused;   /* the driver would not take it off a device, or put it back: its turns are kept by its gate */
    uint32_t refused_status; /* the driver's; 0: errno says it */
    int refused_errno;
    bool suspended; /* VGPU_LEASE_SUSPENDED, as of the last look at its limits */
    struct lease *touched_next;
    uint64_t generation; /* of the limits that sched knows */
    char id[VGPU_ID_BYTES];
};

/* Names the folder leases/, an open descriptor that stays the caller's. Call once, before any other of these. */
void leases_open(int leases_fd);

/* Adds to, or takes from, the list of the leases that are served. The lease stays the caller's. */
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

/* Opens `limits` and `usage` without following links, and says what `usage` is. Precondition: they are not open.
 * 0 or -errno; on failure both are closed again. */
int lease_open_files(int folder_fd, struct lease *lease, struct stat *usage);
uint64_t lease_close_files(struct lease *lease); /* how long that took, see aside.h */

/* Opens `usage` for reading; closing this descriptor causes no event in usage_guard.h. A descriptor, or -errno (-ESTALE if
 * the file is not the one that the lease was added with). */
int lease_open_to_read(const struct lease *lease);

/* Keeps the lease's files open until the matching lease_release; they are opened again for the first hold. False:
 * they cannot be, or are not those that the lease was added with; nothing is held then. */
bool lease_hold(struct lease *lease);
void lease_release(struct lease *lease);

#endif

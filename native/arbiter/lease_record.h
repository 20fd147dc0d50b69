/*
 * lease_record.h: the records of a lease, its processes and its connections, which the arbiter's files share. Only the
 * event loop's thread reads and writes them.
 */
#ifndef ARBITER_LEASE_RECORD_H
#define ARBITER_LEASE_RECORD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "identity.h"
#include "lease.h"
#include "loop.h"
#include "rate.h"
#include "scheduler.h"

struct lease;

/* Reasons to look at a registered process, in ascending order of urgency. */
enum process_look {
    PROCESS_NONE,
    PROCESS_LEFT,  /* the process's connection has ended */
    PROCESS_MOVED, /* the process has registered for another slot */
    PROCESS_ENDED,
};

/* A registered process; its pidfd reports its end. */
struct process {
    struct source pidfd;
    struct lease *lease;
    struct process *next;
    int32_t pid; /* the pid in the arbiter's pid namespace */
    uint32_t slot;
    uint32_t owner;
    uint32_t adopted;            /* devices, as bits, for which the process's channel table was read (cut.c) */
    struct identity_image image; /* the process's program at registration */
    enum process_look due;       /* the most urgent reason for a look that is queued */
    /*
     * the reason for the look that the next tick queues. PROCESS_LEFT: the process kept its slot at the first look, for
     * example because it held the slot's lock. PROCESS_ENDED: the process's slot could not be cleared
     */
    enum process_look later;
};

struct connection {
    struct source socket;
    struct lease *lease;
    struct connection *next;
    struct sched_member member;
    bool joined;    /* the scheduler knows the process as a member */
    int pidfd;      /* pidfd of the process that connected (identity.h); -1 once the process has registered */
    pid_t pid;      /* pid of the process that connected, valid while that process lives */
    uint32_t owner; /* registration number of the process that registered on this connection; 0 if none did */
    uint32_t watch; /* engine cut: what the process was told to report (enum vgpu_turn_flags) */
    uint32_t slot;  /* the slot of the connection's process */
    bool works;     /* engine cut: the process's last message was WANT, not DONE */
};

struct lease {
    struct source listener;          /* its fd is -1 until the socket listens */
    int unbound_fd;                  /* the socket until it listens; -1 afterwards */
    bool binds;                      /* an abandoned thread binds the socket (aside.h) */
    struct lease *next_cut;          /* next lease in the list of leases with the engine cut */
    struct cut_entity *cut_entities; /* one entry for each device; NULL if the gate enforces the tenant's slices */
    struct lease *next;
    struct process *processes;
    struct connection *connections;
    uint32_t connection_count;
    /* reference count of limits_fd and usage_fd: the connections, processes and calls that need them open */
    uint32_t holds;
    int limits_fd; /* -1 while nothing needs the files: an idle lease costs one descriptor, that of its socket */
    int usage_fd;
    unsigned char *usage_map; /* mapping of the usage file for usage_io_store; NULL: not open, or it cannot be mapped */
    dev_t usage_device;       /* identity of the usage file when the lease was added */
    ino_t usage_inode;
    uid_t owner;      /* the lease's uid: the owner of its files */
    bool anyone;      /* any user that reaches the lease may write to it: a container's lease */
    int watch;        /* inotify watch of usage_fd (usage_guard.h) */
    uint32_t cuts;    /* how often `usage` was longer, or used more blocks, than allowed */
    struct rate rate; /* the lease's token bucket (rest.h) */
    bool resting;
    uint32_t long_looks; /* number of consecutive looks at the lease's locks that took too long (rest.c) */
    bool shut;           /* the lease's locks are no longer checked, and its files stay open */
    bool look_later;     /* the next tick looks at disconnected processes and at claimed slots */
    /* for each slot: number of consecutive looks that found the claimed slot without a lock */
    uint8_t unlocked[VGPU_MAX_SLOTS];
    bool look_due; /* the lease is in the queue of looks.h */
    STAILQ_ENTRY(lease) next_due;
    bool ticks;
    struct lease *ticking_next;
    struct sched_tenant tenant;
    bool schedules; /* the scheduler knows the lease's tenant */
    bool touched;   /* the lease's counters must be published */
    bool refused;   /* the engine cut was given up for the tenant, so the gate enforces its slices */
    /* the driver's status for which the engine cut was given up; 0 if refused_errno has the reason */
    uint32_t refused_status;
    int refused_errno;
    bool suspended; /* whether the lease had VGPU_LEASE_SUSPENDED when its limits were last read */
    /*
     * whether the lease was open and had the order to pause when its limits were last read. A suspended lease is not
     * paused, because suspending needs its channels
     */
    bool paused;
    struct lease *touched_next;
    uint64_t generation; /* generation of the limits that the scheduler has */
    char id[VGPU_ID_BYTES];
};

/*
 * Returns a number that identifies the tenant of a lease: the owner's uid. A lease that any user can write (a pod's)
 * counts as a separate tenant.
 */
static inline uint64_t lease_tenant(const struct lease *lease)
{
    return lease->anyone ? 1ULL << 63 | lease->usage_inode : lease->owner;
}

#endif

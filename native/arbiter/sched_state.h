/*
 * sched_state.h: the structures that the scheduler's files share: a device, a tenant, a tenant on a device (an entity),
 * a member process. Only the scheduler's files write them; other files may read. One thread, no locks. Times are
 * nanoseconds of CLOCK_MONOTONIC unless the name says another unit.
 */
#ifndef ARBITER_SCHED_STATE_H
#define ARBITER_SCHED_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

#define SCHED_NEVER UINT64_MAX

/* Iterates over the devices that the tenant holds: `d` is the ordinal in the lease. */
#define EACH_HELD(tenant, d)                              \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if (((tenant)->held >> d & 1) != 0)

/*
 * Time that a slice of a process under the gate may drain after its end. Then the next tenant is admitted beside the
 * running one (a bypass). For a tenant whose last slice was bypassed, it is a quarter of this time.
 */
#define SCHED_DRAIN_BOUND_NS 100000000ull
#define SCHED_DEBT_WAIT_NS 1000000000ull /* maximum wait that the debt of one long kernel can cause */
#define SCHED_STARVED_NS 1000000000ull   /* a tenant that has waited longer than this is next, whatever its priority */

struct sched_limits {
    uint32_t share;  /* compute share in hundredths of a percent */
    uint32_t policy; /* a value of enum vgpu_share_policy */
    int32_t priority;
};

struct sched_tenant;

struct sched_device {
    char uuid[VGPU_UUID_BYTES];
    struct sched_device *next;
    struct sched_entity *entities; /* list of entities whose tenants have processes */
    uint32_t users;                /* number of tenants, with or without processes */
    uint32_t busy;                 /* number of tenants that hold the device */
    bool managed;
    bool cut;                         /* the device's engine is the engine cut (cut.h) */
    struct sched_entity *next_entity; /* the next holder of the device (run_queue.h) */
    /* results of the last call of fair_refresh for the device */
    uint64_t refreshed_at;
    uint32_t active;     /* number of entities that compete */
    double weights;      /* sum of the weights of all active entities; 1 is the whole device */
    double none_weight;  /* weight of an active entity that has no limit */
    double round_ns;     /* length of a round */
    double own_round_ns; /* length of a round that the device's own entities need; round_ns may be longer (fair.c) */
};

/* time in which a tenant's program waited in a call, and time in which its host worked or paused */
struct sched_waits {
    double waiting_ns;
    double host_ns;
};

/* An entity: a tenant on one device. */
struct sched_entity {
    struct sched_device *device;
    struct sched_tenant *tenant;
    struct sched_entity *next; /* list of the device's entities */
    struct sched_limits limits;
    bool holding;
    bool backfills;         /* the tenant runs beside the holder (backfill.h) */
    uint64_t pressed_until; /* until this time the tenant counts as using all the time that it can get (backfill.c) */
    /* length of the time for which the tenant has counted as using all the time that it can get */
    double pressed_ns;
    uint64_t retry_at; /* the earliest time of the next trial of exclusive slices */
    uint64_t retry_ns;
    /*
     * time with unfinished work (busy_ns) and without (gaps_ns), since the tenant's work was last judged (backfill.c)
     */
    double busy_ns;
    double gaps_ns;
    /* how the tenant's program waited since this was last looked at, alone and beside other tenants (backfill.c) */
    struct sched_waits alone;
    struct sched_waits beside;
    double host_alone; /* the host's part of the time when the tenant last had the device alone */
    bool alone_known;
    uint64_t crowded_until; /* until this time the tenant runs beside no other, because it gets too little there */
    double gap_ns; /* gaps beside other tenants beyond what the driver's switches take, not yet counted (backfill.c) */
    uint64_t used_at_grant_ns; /* value of count.used_ns at the beginning of the present slice */
    double least_share;        /* the smallest share that the entity had during the same work (fair_share) */
    uint64_t used_before_ns;   /* value of count.used_ns at the beginning of the present work, or else the last */
    /* number of streams among which the driver divides time while the tenant runs beside others; 0: not known */
    uint32_t streams;
    /* until this time the tenant's work counts as having gaps: it backfills, and others backfill its slices */
    uint64_t light_until;
    /* end of the time that is charged already; set while the tenant holds the device or backfills */
    uint64_t charged_until;
    uint64_t left_at;         /* when the tenant's last process ended; 0: it never had a process */
    uint32_t hand_over_calls; /* number of calls that take the tenant off the device; 0: not known */
    /* device time that the tenant's share has earned and that it has not used; negative: debt */
    double tokens_ns;
    /*
     * as tokens_ns, but the tenant's use of the gaps of others' work counts, too (backfill.c), and the tenant earns a
     * little more (fair.c)
     */
    double spare_ns;
    bool apart;      /* a `hard` tenant has used up its spare_ns: it runs beside no other until it has saved some */
    double vtime_ns; /* virtual time: device time that the tenant has used, divided by its share */
    struct vgpu_compute count;
};

enum sched_member_state {
    SCHED_IDLE,
    SCHED_WAITING, /* the process waits for a grant */
    SCHED_RUNNING, /* the process has a grant, and has not sent DONE */
    SCHED_OVERRUN, /* the process was bypassed, and has not sent DONE */
};

struct sched_member {
    struct sched_tenant *tenant;
    struct sched_member *next;
    enum sched_member_state state;
    bool wants; /* while RUNNING or OVERRUN: further launches already wait at the process's gate */
    /* engine cut: the process is preempted at the end of a slice, so it does not give the slice back itself */
    bool cut;
    uint32_t devices; /* the devices that the process uses, as bits */
    uint64_t seen_at; /* when the process last wanted or had a slice; 0: never */
    uint64_t turn;
};

struct sched_tenant {
    struct sched_tenant *next; /* next tenant in the list of tenants with processes */
    struct sched_tenant *next_waiting;
    int32_t rank;                                    /* rank of the tenant's priority in the run queue (run_queue.c) */
    double ahead;                                    /* the tenant's lead in virtual time, in half rounds */
    struct sched_entity *entities[VGPU_MAX_DEVICES]; /* the tenant's entities, by the device's ordinal in the lease */
    uint32_t device_count;
    struct sched_member *members;
    uint32_t wanted; /* devices that the tenant wants, as bits; gang.h computes for which of them it waits */
    uint32_t held;   /* devices that the tenant holds, as bits */
    bool free_running;
    bool changed;  /* the tenant's limits have changed: its debt is forgiven when it holds no slice */
    bool stopping; /* the slice is revoked, or over */
    bool lingers;  /* engine cut: the tenant is idle, and may stay on its devices */
    /* engine cut: the tenant's slice is over, and the tenant stays to backfill the next tenant's slice */
    bool stays;
    bool stuck; /* the slice is over and did not drain: a kernel may wait for a kernel on another device */
    /* until when processes may join while the tenant is stuck; 0: it was not stuck in this slice */
    uint64_t joined_until;
    bool open_ended;  /* the slice has no end until another tenant can use the device */
    uint32_t overrun; /* devices on which the tenant was bypassed, as bits, while processes are OVERRUN */
    /* number of slices in a row that did not drain in time, so that the next tenant was admitted beside this one */
    uint32_t bypasses;
    uint64_t overrun_since;
    uint64_t turn;
    uint64_t granted_at;
    uint64_t member_left_at; /* when a process last gave back the slice */
    uint64_t quantum_ns;     /* how long the tenant may hold the slice while others want it */
    uint64_t ends_at;        /* end of the slice; SCHED_NEVER while it has no end */
    uint64_t waits_since;
    uint64_t last_held;
    uint64_t idle_since; /* since when the tenant is idle; 0: it has work, or never had any */
    uint64_t work_since; /* when the tenant last got work after being idle */
    /* the tenant got its slice after waiting for SCHED_STARVED_NS, so no tenant of a higher priority interrupts it */
    bool aged;
    uint64_t idle_ns;   /* idle time of the process that gave its slice back last */
    bool idle_measured; /* the arbiter measured idle_ns; otherwise the process reported it */
    /*
     * devices, as bits, of the last slice. By the tenant's own report it was idle there for `unproven_ns` more than the
     * arbiter believes: this time stays charged until the tenant has held no slice for as long
     */
    uint32_t unproven;
    uint64_t unproven_ns;
};

/*
 * The scheduler's messages to processes. sched_want and sched_run call these functions, which must not call the
 * scheduler.
 */
struct sched_messages {
    /* Tells the process that it may run from now on, under the terms of `turn`. A running process gets new terms. */
    void (*grant)(struct sched_member *member, const struct vgpu_turn *turn);
    /*
     * Tells the process that its slice is over. When the process has answered, the caller calls sched_done; under the
     * engine cut it calls sched_cut_done when the channels are disabled.
     */
    void (*revoke)(struct sched_member *member);
};

#endif

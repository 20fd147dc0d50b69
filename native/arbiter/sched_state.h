/*
 * sched_state.h: the scheduler's structures, which its files share: a device, a tenant, a tenant on a device (an
 * entity), a member process. Written by the scheduler's files only; others read. One thread, no locks. Times are
 * nanoseconds of CLOCK_MONOTONIC unless the name says another unit.
 */
#ifndef ARBITER_SCHED_STATE_H
#define ARBITER_SCHED_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

#define SCHED_NEVER UINT64_MAX

/* For each device that the tenant holds: `d` is its ordinal in the lease. */
#define EACH_HELD(tenant, d)                              \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if (((tenant)->held >> d & 1) != 0)

/*
 * After the end of a slice; then the next tenant is admitted beside the running one. A quarter of it for a tenant that
 * was bypassed just before.
 */
#define SCHED_DRAIN_BOUND_NS 100000000ull
#define SCHED_DEBT_WAIT_NS 1000000000ull /* longest wait that the debt of one long kernel can cost */
#define SCHED_STARVED_NS 1000000000ull   /* a tenant that has waited longer is next, whatever its priority */

struct sched_limits {
    uint32_t share;  /* hundredths of a percent */
    uint32_t policy; /* enum vgpu_share_policy */
    int32_t priority;
    uint32_t quantum_us; /* 0: no request */
};

struct sched_tenant;

struct sched_device {
    char uuid[VGPU_UUID_BYTES];
    struct sched_device *next;
    struct sched_entity *entities; /* list of entities whose tenants have processes */
    uint32_t users;                /* tenants, with or without processes */
    uint32_t busy;                 /* tenants that hold the device */
    bool managed;
    bool cut; /* the engine is cut: a latency tenant does not need short slices of others, which can be preempted */
    struct sched_entity *next_entity; /* the next holder, see run_queue.h */
    /* values of the last fair_refresh */
    uint64_t refreshed_at;
    uint32_t active;    /* entities that compete */
    double weights;     /* sum over all active entities; 1 is the whole device */
    double none_weight; /* weight of an active entity without a limit */
    double round_ns;
    double wish_ns; /* shortest quantum that a present tenant requests for other tenants; 0: none */
    const struct sched_entity *latency_tenant;
};

/* A tenant on a device. */
struct sched_entity {
    struct sched_device *device;
    struct sched_tenant *tenant;
    struct sched_entity *next; /* list of the device's entities */
    struct sched_limits limits;
    bool holding;
    bool backfills;         /* runs beside the holder: backfill.h */
    uint64_t pressed_until; /* until then its work counts as endless */
    double pressed_ns;      /* length of that span */
    uint64_t retry_at;      /* the earliest time of the next trial of exclusive slices */
    uint64_t retry_ns;
    double busy_ns; /* time with and without unfinished work since the last verdict: see backfill.h */
    double gaps_ns;
    uint64_t used_before_ns; /* value of count.used_ns before its present or last work */
    uint32_t streams;        /* streams among which the driver divides time while it runs beside others; 0: not known */
    /* until then its work counts as having gaps: it backfills, and others backfill its slices */
    uint64_t light_until;
    uint64_t charged_until; /* up to when it is charged, while it holds or backfills */
    uint64_t left_at;       /* when the tenant's last process ended; 0: it never had one */
    uint64_t hand_over_ns;  /* to put it on the device and to take it off; 0: not known */
    double tokens_ns;       /* device time that its share has earned and that it has not used; negative: debt */
    double vtime_ns;        /* device time used, divided by the weight */
    struct vgpu_compute count;
};

enum sched_member_state {
    SCHED_IDLE,
    SCHED_WAITING, /* waits for a grant */
    SCHED_RUNNING, /* has a grant, and has not sent DONE */
    SCHED_OVERRUN, /* was bypassed, and has not sent DONE */
};

struct sched_member {
    struct sched_tenant *tenant;
    struct sched_member *next;
    enum sched_member_state state;
    bool wants;       /* while RUNNING or OVERRUN: launches already wait at its gate */
    bool cut;         /* engine cut: preempted at the end of a slice, so it does not give the slice back itself */
    uint32_t devices; /* the devices that it uses, as bits */
    uint64_t seen_at; /* when it last wanted or had a slice; 0: never */
    uint64_t turn;
};

struct sched_tenant {
    struct sched_tenant *next; /* list of tenants with processes */
    struct sched_tenant *next_waiting;
    int32_t rank;                                    /* its position in the run queue: run_queue.c */
    double ahead;                                    /* in half rounds */
    struct sched_entity *entities[VGPU_MAX_DEVICES]; /* by the ordinal in the lease */
    uint32_t device_count;
    struct sched_member *members;
    uint32_t wanted; /* devices that it wants, as bits; gang.h computes which of them it waits for */
    uint32_t held;   /* devices that it holds, as bits */
    bool free_running;
    bool changed;          /* its limits have changed: use under the old ones is forgiven */
    bool stopping;         /* revoked, or its slice is over */
    bool lingers;          /* cut: it is idle, and may stay on its devices */
    bool stays;            /* cut: its slice is over, and it stays to backfill in the next tenant's slice */
    bool stuck;            /* its slice is over and did not drain: a kernel may wait for one on another device */
    uint64_t joined_until; /* until when processes may join while it is stuck; 0: it was not stuck in this slice */
    bool open_ended;       /* lent without an end, until another tenant can use it */
    uint32_t overrun;      /* devices on which it was bypassed, as bits, while processes are OVERRUN */
    /* how often in a row the next tenant was admitted beside it, because its ended slice did not drain in time */
    uint32_t bypasses;
    uint64_t overrun_since;
    uint64_t turn;
    uint64_t granted_at;
    uint64_t member_left_at; /* when a process last left the slice */
    uint64_t quantum_ns;     /* how long it may hold the slice while others want it */
    uint64_t ends_at;        /* SCHED_NEVER while open-ended */
    uint64_t waits_since;
    uint64_t last_held;
    uint64_t idle_since; /* 0: it has work, or never had any */
    uint64_t work_since; /* when it last got work after being idle */
    bool aged;           /* it got its slice after waiting for SCHED_STARVED_NS, so the slice is not interrupted */
    uint64_t idle_ns;    /* idle time of the process that gave back last */
    bool idle_measured;  /* by the arbiter; else the process says so */
    uint32_t unproven;   /* bits of the devices on which `unproven_ns` of the last slice are charged until then */
    uint64_t unproven_ns;
};

/* The scheduler's messages to processes, called within sched_want and sched_run; they must not call the scheduler. */
struct sched_messages {
    /* The process may run from now on, under the terms of `turn`; for a running process these are new terms. */
    void (*grant)(struct sched_member *member, const struct vgpu_turn *turn);
    /* The process's slice is over; it answers by sched_done. */
    void (*revoke)(struct sched_member *member);
};

#endif

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

/* After a turn's end; then the next tenant is let in beside. A quarter of it for a tenant that needed it just before. */
#define SCHED_DRAIN_BOUND_NS 100000000ull
#define SCHED_DEBT_WAIT_NS 1000000000ull /* longest wait that the debt of one long kernel can cost */
#define SCHED_STARVED_NS 1000000000ull   /* a tenant that has waited so long is next, whatever its priority */

struct sched_limits {
    uint32_t share;  /* hundredths of a percent */
    uint32_t policy; /* enum vgpu_share_policy */
    int32_t priority;
    uint32_t quantum_us; /* 0: no wish */
};

struct sched_tenant;

struct sched_device {
    char uuid[VGPU_UUID_BYTES];
    struct sched_device *next;
    struct sched_entity *entities; /* of tenants that have members */
    uint32_t users;                /* tenants, with members or without */
    uint32_t busy;                 /* tenants that hold the device */
    bool managed;
    bool cut; /* tenants are taken off it at once: short turns for all are not needed for one that cannot wait */
    struct sched_entity *next_entity; /* which gets it next, see run_queue.h */
    /* as of the last fair_refresh */
    uint64_t refreshed_at;
    uint32_t active;    /* entities that compete */
    double weights;     /* of all active entities; 1 is the whole device */
    double none_weight; /* of an active entity without a limit */
    double round_ns;
    double wish_ns; /* shortest quantum that a present tenant asks of the others; 0: none */
    const struct sched_entity *latency_tenant;
};

/* A tenant on a device. */
struct sched_entity {
    struct sched_device *device;
    struct sched_tenant *tenant;
    struct sched_entity *next; /* on the device */
    struct sched_limits limits;
    bool holding;
    bool backfills;         /* runs beside the holder: backfill.h */
    uint64_t pressed_until; /* its work never ends, as far as is known */
    double pressed_ns;      /* for so long */
    uint64_t retry_at;      /* not before: taken for one that fills the device since all there seem to */
    uint64_t retry_ns;
    double busy_ns; /* with unfinished work, and without, since it was last judged: see backfill.h */
    double gaps_ns;
    uint64_t used_before_ns; /* of count.used_ns, before it had the work that it has now, or had last */
    uint32_t streams;        /* that the driver gives time slices to while it runs beside others; 0: not known */
    uint64_t light_until;    /* its work has gaps, as far as is known: it runs beside others, and others beside it */
    uint64_t charged_until;  /* while it holds or backfills */
    uint64_t left_at;        /* when its tenant's last member went; 0: it never had one */
    uint64_t hand_over_ns;   /* to put it on the device and to take it off; 0: not known */
    double tokens_ns;        /* device time that its share has earned and it has not used; negative: debt */
    double vtime_ns;         /* device time used, divided by the weight */
    struct vgpu_compute count;
};

enum sched_member_state {
    SCHED_IDLE,
    SCHED_WAITING, /* wants a grant */
    SCHED_RUNNING, /* was granted, and has not said DONE */
    SCHED_OVERRUN, /* its turn was bypassed, and it has not said DONE */
};

struct sched_member {
    struct sched_tenant *tenant;
    struct sched_member *next;
    enum sched_member_state state;
    bool wants;       /* while RUNNING or OVERRUN: launches wait at its gate already */
    bool cut;         /* taken off its devices at the end of a turn: it gives nothing back by itself */
    uint32_t devices; /* that it uses, as bits */
    uint64_t seen_at; /* when it last wanted a turn or had one; 0: never */
    uint64_t turn;
};

struct sched_tenant {
    struct sched_tenant *next; /* of those that have members */
    struct sched_tenant *next_waiting;
    int32_t rank;                                    /* its position in the run queue: run_queue.c */
    double ahead;                                    /* in half rounds */
    struct sched_entity *entities[VGPU_MAX_DEVICES]; /* by ordinal in the lease */
    uint32_t device_count;
    struct sched_member *members;
    uint32_t wanted; /* devices, as bits; gang.h says which of them it waits for */
    uint32_t held;   /* devices, as bits; 0: holds none */
    bool free_running;
    bool changed;          /* its limits are new: what it used under the old ones is forgiven */
    bool stopping;         /* revoked, or its turn is over */
    bool lingers;          /* cut: it is idle, and need not be taken off its devices */
    bool stays;            /* cut: its turn is over, and it backfills in the next one's: it is not taken off for that */
    bool stuck;            /* its turn is over and did not drain: its other devices' kernels may be waited for */
    uint64_t joined_until; /* while it is stuck; and the end of the last time that it was, 0: none in this turn */
    bool open_ended;       /* lent until another tenant can use it */
    uint32_t overrun;      /* devices that it was bypassed on, as bits, while members are OVERRUN */
    uint32_t bypasses;     /* in a row */
    uint64_t overrun_since;
    uint64_t turn;
    uint64_t granted_at;
    uint64_t member_left_at; /* when a member's part of the turn last ended */
    uint64_t quantum_ns;     /* what it may keep in the face of others */
    uint64_t ends_at;        /* SCHED_NEVER while open-ended */
    uint64_t waits_since;
    uint64_t last_held;
    uint64_t idle_since; /* 0: it has work, or never had some */
    uint64_t work_since; /* when it last got work after it was idle */
    bool aged;           /* it got its turn because it had waited for SCHED_STARVED_NS: it is not interrupted */
    uint64_t idle_ns;    /* of the member that gave back last */
};

/* How the scheduler reaches its members. Called within sched_want and sched_run; none may call the scheduler. */
struct sched_messages {
    /* The member may run from now on, as `turn` says; for a member that runs, new terms of its turn. */
    void (*grant)(struct sched_member *member, const struct vgpu_turn *turn);
    /* The member's turn is over; it answers by sched_done. */
    void (*revoke)(struct sched_member *member);
};

#endif

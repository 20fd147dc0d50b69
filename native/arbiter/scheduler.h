/*
 * scheduler.h: who computes next. Pure: no I/O and no clock; time comes in as nanoseconds, and what is to be
 * said to tenants goes out through functions that the caller provides (turns.c, or a test).
 *
 * A tenant (a lease) has a place on each of its devices, and members (its registered processes). At
 * most one tenant holds a managed device at a time, all its members together; a tenant that wants
 * several devices gets them together. A device is managed while somebody on it is under a limit that
 * matters: one `hard` tenant, or two tenants of which one has a share.
 */
#ifndef ARBITER_SCHEDULER_H
#define ARBITER_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"
#include "gap_predictor.h"

#define SCHED_NEVER UINT64_MAX

/* For each device that the tenant holds: `d` is its ordinal in the lease. */
#define EACH_HELD(tenant, d)                              \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if (((tenant)->held >> d & 1) != 0)

/* After a turn's end; then the next tenant is let in beside. A quarter of it for who needed it just before. */
#define SCHED_DRAIN_BOUND_NS 100000000ull
#define SCHED_DEBT_WAIT_NS 1000000000ull /* longest wait that the debt of one long kernel can cost */
#define SCHED_STARVED_NS 1000000000ull   /* who has waited so long is next, whatever its priority */

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
    struct sched_place *places; /* of tenants that have members */
    uint32_t users;             /* tenants, with members or without */
    uint32_t busy;              /* tenants that hold the device */
    bool managed;
    bool cut; /* tenants are taken off it at once: short turns for all are not needed for one that cannot wait */
    struct sched_place *next_place; /* who gets it next, see run_queue.h */
    /* as of the last fair_refresh */
    uint64_t refreshed_at;
    uint32_t active;    /* places that compete */
    double weights;     /* of all active places; 1 is the whole device */
    double none_weight; /* of an active place without a limit */
    double round_ns;
    double wish_ns; /* shortest quantum that somebody present asks of the others; 0: none */
    const struct sched_place *wisher;
};

/* A tenant on a device. */
struct sched_place {
    struct sched_device *device;
    struct sched_tenant *tenant;
    struct sched_place *next; /* on the device */
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
    double tokens_ns;        /* device time that its share has earned and it has not used; negative: debt */
    double vtime_ns;         /* device time used, divided by the weight */
    struct vgpu_compute count;
};

enum sched_member_state {
    SCHED_IDLE,
    SCHED_WAITING, /* wants a grant */
    SCHED_RUNNING, /* was granted, and has not said DONE */
    SCHED_LATE,    /* its turn was bypassed, and it has not said DONE */
};

struct sched_member {
    struct sched_tenant *tenant;
    struct sched_member *next;
    enum sched_member_state state;
    bool wants;       /* while RUNNING or LATE: launches wait at its gate already */
    bool cut;         /* taken off its devices at the end of a turn: it gives nothing back by itself */
    uint32_t devices; /* that it uses, as bits */
    uint64_t seen_at; /* when it last wanted a turn or had one; 0: never */
    uint64_t turn;
};

struct sched_tenant {
    struct sched_tenant *next; /* of those that have members */
    struct sched_tenant *next_waiting;
    int32_t rank;                                 /* its place in the order: see run_queue.c */
    double ahead;                                 /* in half rounds */
    struct sched_place *places[VGPU_MAX_DEVICES]; /* by ordinal in the lease */
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
    bool open_ended;       /* lent until somebody else can use it */
    uint32_t late;         /* devices that it was bypassed on, as bits, while members are LATE */
    uint32_t bypasses;     /* in a row */
    uint64_t late_since;
    uint64_t turn;
    uint64_t granted_at;
    uint64_t member_left_at; /* when a member's part of the turn last ended */
    uint64_t quantum_ns;     /* what it may keep in the face of others */
    uint64_t ends_at;        /* SCHED_NEVER while open-ended */
    uint64_t drains_at;      /* when the device is expected to be idle; SCHED_NEVER: not known */
    uint64_t soon_at;        /* when its own next turn was last said to begin; 0: it was not said */
    uint64_t waits_since;
    uint64_t last_held;
    uint64_t idle_since;       /* 0: it has work, or never had some */
    uint64_t work_since;       /* when it last got work after it was idle */
    struct gap_predictor busy; /* its turns */
    struct gap_predictor idle; /* from the end of one until it wants the next */
    bool aged;                 /* it got its turn because it had waited for SCHED_STARVED_NS: it is not interrupted */
    uint64_t idle_ns;          /* of the member that gave back last */
};

/* A new tenant without members. False: out of memory. */
bool sched_tenant_add(struct sched_tenant *tenant, uint32_t device_count, const char (*uuids)[VGPU_UUID_BYTES]);
void sched_tenant_remove(struct sched_tenant *tenant, uint64_t now);

/* New limits of one place; takes effect with the next sched_run. */
void sched_set_limits(struct sched_tenant *tenant, uint32_t ordinal, const struct sched_limits *limits);

void sched_member_add(struct sched_tenant *tenant, struct sched_member *member, uint64_t now);
void sched_member_remove(struct sched_member *member, uint64_t now);

/* A member has launches waiting for these devices (bits; bits beyond the lease are ignored). */
void sched_want(struct sched_member *member, uint32_t devices, uint64_t now);

/* A member gave its turn back: number, MORE, and how long it idled at its end (believed up to a bound, as it
 * is when the member says that it runs nothing). Stale turn numbers are ignored. */
void sched_done(struct sched_member *member, const struct vgpu_turn *turn, uint64_t now);

/* A member that is cut has nothing to do any more, in a turn or waiting for one, and had nothing for `idle_ns`
 * (believed up to a bound). */
void sched_idle(struct sched_member *member, uint64_t idle_ns, uint64_t now);

/* All cut members of the tenant are off its devices, as sched_messages.revoke asked for; of the turn nothing of them
 * ran for `lost_ns`. They want the next turn: one that does not says sched_idle. */
void sched_cut_done(struct sched_tenant *tenant, uint64_t lost_ns, uint64_t now);

/* For what part of the last `span_ns` that a tenant with work was on the device some of it was unfinished, 0 to 1 and
 * above for several processes; as the tenant says. `streams`: see struct sched_place. */
void sched_note_load(struct sched_place *place, double load, uint64_t span_ns, uint32_t streams, uint64_t now);

/* A member launches no more in its turn, and expects the device to be idle in `left_ns`. */
void sched_ending(struct sched_member *member, uint64_t number, uint64_t left_ns, uint64_t now);

/* Grants, revokes and bypasses what is due. Returns when to call again, at the latest. */
uint64_t sched_run(uint64_t now);

/* How the scheduler reaches its members. Called within sched_want and sched_run; none may call the scheduler. */
struct sched_messages {
    /* The member may run from now on, as `turn` says; for a member that runs, new terms of its turn. */
    void (*grant)(struct sched_member *member, const struct vgpu_turn *turn);
    /* The member's turn is over; it answers by sched_done. */
    void (*revoke)(struct sched_member *member);
    /* The waiting member's turn is expected to begin in `in_ns`. */
    void (*soon)(struct sched_member *member, uint64_t in_ns);
};

/* `messages` stays the caller's and lives as long as the scheduler. Call once, before the first member is added. */
void sched_open(const struct sched_messages *messages);

/* For tests: the devices that are known. */
const struct sched_device *sched_devices(void);

#endif

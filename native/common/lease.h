/*
 * lease.h: the shared-memory ABI through which a preload allocation is enforced and metered.
 *
 * A lease is the folder <run>/leases/<allocation>/ with three entries:
 *   limits        written by vgpud only; read-only to the tenant
 *   usage         written by the tenant's processes and the arbiter; hostile input to vgpud and the arbiter
 *   arbiter.sock  SEQPACKET; a tenant process registers here, and its pid comes from SO_PEERCRED
 * Where the tenant's uid is not known (a pod's), any user may write `usage`. Then <allocation>/ is closed
 * to others than root (mode 0700), the entries are in <allocation>/anyone/, and that is what is mounted.
 *
 * A slot of `usage` belongs to the process that holds the POSIX write lock (F_SETLK) on the slot's
 * first byte. The kernel drops that lock when the process dies, execs or closes its files, at any
 * instruction, so the lock alone says whether a slot's owner lives: a process that gets the lock may clear
 * the slot. F_GETLK names the holder's pid in the asker's pid namespace, so a restarted arbiter re-adopts
 * every live process from the kernel alone. A forked child does not inherit the lock.
 *
 * This header is the single source: vgpud/lease_layout.py is generated from it by layout.c.
 * All words are little-endian and naturally aligned; sizes are bytes; shares are hundredths of a percent.
 */
#ifndef VGPU_LEASE_H
#define VGPU_LEASE_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_LEASE_MAGIC 0x4c555056u /* "VPUL" */
#define VGPU_LEASE_VERSION 1u

#define VGPU_MAX_DEVICES 16u /* devices of one allocation */
#define VGPU_MAX_SLOTS 256u  /* processes of one allocation at one time */
#define VGPU_UUID_BYTES 64u  /* "GPU-..." or "MIG-...", NUL-terminated */
#define VGPU_ID_BYTES 64u    /* allocation id, NUL-terminated */
#define VGPU_CALL_BYTES 48u  /* name of a function of the driver, NUL-terminated; a longer one is cut */
#define VGPU_SHARE_ALL 10000u

/* Where a tenant finds its lease: the fixed mount point first, else the folder that the environment
 * names. Only the place can come from the environment, never a limit. */
#define VGPU_LEASE_MOUNT "/run/vgpu/lease"
#define VGPU_LEASE_ENV "VGPU_LEASE"
#define VGPU_LIMITS_FILE "limits"
#define VGPU_USAGE_FILE "usage"
#define VGPU_ARBITER_SOCKET "arbiter.sock"
#define VGPU_MOVED_FILE "moved" /* written by vgpud where a tenant was moved: see relocated.h */
#define VGPU_ANYONE_FOLDER "anyone"

/* What happens at the compute share's edge; values are part of the ABI. */
enum vgpu_share_policy {
    VGPU_SHARE_NONE = 0,            /* no compute limit */
    VGPU_SHARE_HARD = 1,            /* never above the share, also alone */
    VGPU_SHARE_WORK_CONSERVING = 2, /* idle time is lent */
};

enum vgpu_lease_state {
    VGPU_LEASE_OPEN = 1,
    VGPU_LEASE_CLOSED = 2, /* released: existing memory stays until freed, nothing new is granted */
    VGPU_LEASE_SUSPENDED =
        3, /* suspended: a process with work says so (slot.wants), and waits until it is open again */
};

/* Where the memory is that libvgpu can move (evictable.h): what plain allocations get in a lease of one
 * device whose tenants take turns. */
enum vgpu_lease_memory {
    VGPU_MEMORY_FIXED = 0, /* there is none: plain allocations are the driver's own */
    VGPU_MEMORY_HERE = 1,  /* on the device */
    VGPU_MEMORY_OUT = 2,   /* while the lease is away: on the host; each process says in its slot how far it is */
};

/* One device of the lease. */
struct vgpu_device_limits {
    char uuid[VGPU_UUID_BYTES]; /* another one after a move: the entry stays that of its slice */
    uint64_t memory_bytes;      /* limit, contexts and modules included */
    uint32_t share;             /* hundredths of a percent, 1..10000 */
    uint32_t share_policy;      /* enum vgpu_share_policy */
    int32_t priority;           /* higher goes first */
    uint32_t quantum_us;        /* no other tenant's turn is longer while this one is present; 0: as the shares want */
};

/*
 * The `limits` file. vgpud rewrites it in place under a sequence lock: generation is odd while a
 * write is under way. A reader copies the body between two equal, even reads of generation
 * (acquire); after many failed tries it keeps its last good copy (fail static).
 */
struct vgpu_limits {
    uint32_t magic;
    uint32_t version;
    uint64_t generation;
    char allocation[VGPU_ID_BYTES];
    uint32_t state; /* enum vgpu_lease_state */
    uint32_t device_count;
    struct vgpu_device_limits devices[VGPU_MAX_DEVICES];
    uint32_t memory;     /* enum vgpu_lease_memory; not in a page of a vgpud that knew none: zero */
    uint32_t keep_share; /* hundredths of a percent of each process's movable memory that stay on the device
                          * while it is OUT: no tenant needs the room yet. Zero of a vgpud that knew none */
};

/* A page that was made before `memory` was known ends here. */
#define VGPU_LIMITS_BYTES_LEAST offsetof(struct vgpu_limits, memory)

/* Memory of one process on one device, by kind. Each word is written by its own process only. */
struct vgpu_slot_device {
    uint64_t used_bytes;    /* held by API allocations, in the driver's pages */
    uint64_t claim_bytes;   /* claimed by calls that are in the driver now, see account.h */
    uint64_t context_bytes; /* contexts, modules, local memory, streams, as learnt from the driver */
    uint64_t peak_bytes;
    uint64_t refusals_limit; /* refused: over this lease's limit */
    uint64_t refusals_card;  /* refused by the driver: the card itself is full */
    uint64_t launches;
    uint64_t throttled_ns;
};

/* Owner word of a slot: 0 is free; VGPU_OWNER_SELF is claimed by lock, not yet registered; otherwise
 * the registration number that the arbiter gave. Sums count every slot whatever its owner word. */
#define VGPU_OWNER_SELF 0x80000000u

/* How far a process's memory has followed the lease's word. */
enum vgpu_swap_phase {
    VGPU_SWAP_HERE = 0,
    VGPU_SWAP_DRAINING = 1, /* nothing has moved yet: what runs is waited for */
    VGPU_SWAP_GOING = 2,
    VGPU_SWAP_OUT = 3,
    VGPU_SWAP_COMING = 4,
    VGPU_SWAP_REFUSED = 5, /* it could not go, and is here again */
};
#define VGPU_SWAP_KEPT_SHIFT 8

struct vgpu_slot {
    uint32_t owner;
    int32_t pid;       /* as the process sees itself: informative, never trusted */
    uint64_t start_ns; /* CLOCK_MONOTONIC at the claim */
    /* Written when the arbiter says LOOK: */
    uint64_t calls;         /* launches by weight, copies, synchronisations and allocations so far */
    uint32_t looks;         /* how often this was written */
    uint32_t busy;          /* 1: work that was given to the devices has not all run */
    uint32_t quiet;         /* 1: the lease is away, and libvgpu itself calls the driver no more until it is back */
    uint32_t wants;         /* threads that wait for the lease to come back; at any time */
    uint32_t swap_phase;    /* enum vgpu_swap_phase in the low byte; above it, while OUT, the MiB of movable memory
                             * that are on the device still: in one word, so that both are of one moment */
    uint32_t swap_error;    /* CUresult that REFUSED, or that keeps COMING; 0: none */
    uint64_t movable_bytes; /* of the process's memory, wherever it is */
    uint64_t host_bytes;    /* of the host's memory that are kept for it */
    struct vgpu_slot_device devices[VGPU_MAX_DEVICES];
};

/* Compute time of the whole lease on one device; written by the arbiter only. Times in nanoseconds. */
struct vgpu_compute {
    uint64_t granted_ns; /* length of the turns given */
    uint64_t used_ns;    /* from the grant until the device was given back */
    uint64_t waited_ns;  /* wanted the device and did not have it */
    uint64_t overrun_ns; /* held beyond the end of a turn */
    uint64_t turns;
    uint64_t bypasses; /* turns whose end did not come within the drain bound: the next was let in beside */
    uint64_t reserved[2];
};

/* The `usage` file. */
struct vgpu_usage {
    uint32_t magic;
    uint32_t version;
    uint32_t slot_high;                     /* slots at or above this index have never been used */
    uint32_t context_mib[VGPU_MAX_DEVICES]; /* what a context took when one was last measured; 0: none was */
    uint32_t unknown_calls; /* functions that a process's driver exports and libvgpu does not know: a newer driver */
    char unknown_call[VGPU_CALL_BYTES];                /* one of them, NUL-terminated */
    struct vgpu_slot_device retired[VGPU_MAX_DEVICES]; /* counters of processes that ended; arbiter's */
    struct vgpu_slot slots[VGPU_MAX_SLOTS];
    struct vgpu_compute compute[VGPU_MAX_DEVICES];
};

/*
 * The channels that carry a process's kernels, for an arbiter that takes tenants off the device by the driver's
 * own call (rm.h). At VGPU_CHANNELS_AT of the `usage` file there is one table a slot, written by the slot's
 * process as the driver makes and frees channels; a file that ends before them has none. Every number here is a
 * tenant's claim: the arbiter makes its call through the tenant's own open file, and the driver refuses what is
 * not of that file.
 */
#define VGPU_GROUP_CHANNELS 8u
#define VGPU_MAX_GROUPS 255u
struct vgpu_channel_group {
    uint8_t uuid[16]; /* of the device, as the driver gave it */
    uint32_t file;    /* number of the process's open control device */
    uint32_t client;  /* handles of the driver's, see rm.h */
    uint32_t subdevice;
    uint32_t count; /* of channels; a group with more has several entries */
    uint32_t channels[VGPU_GROUP_CHANNELS];
};
struct vgpu_channel_table {
    uint64_t generation; /* odd while it is written */
    uint32_t count;
    uint32_t lost; /* 1: there are groups that had no room here */
    uint32_t
        off; /* devices of the lease, as bits, that its channels are off or on their way from: the arbiter's word */
    uint32_t samples;    /* looks of the process at its own work while it was on the device, and those of them that */
    uint32_t unfinished; /* found some: a claim, which only decides whether others run beside it */
    uint8_t unused[36];
    struct vgpu_channel_group groups[VGPU_MAX_GROUPS];
};
#define VGPU_CHANNELS_AT 294912u /* offset of the first table: a whole page's */
#define VGPU_USAGE_FILE_BYTES (VGPU_CHANNELS_AT + VGPU_MAX_SLOTS * sizeof(struct vgpu_channel_table))

/* Messages on arbiter.sock (SEQPACKET, one struct a packet). */
enum vgpu_message_kind {
    VGPU_MSG_REGISTER = 1, /* tenant -> arbiter; slot = the slot whose lock the sender holds */
    VGPU_MSG_WELCOME = 2,  /* arbiter -> tenant; owner = word for the slot, value = host pid */
    VGPU_MSG_REFUSED = 3,  /* arbiter -> tenant; value: errno (ESHUTDOWN: the lease is closed) */
    /* Compute turns, on a registered connection; `turn` is filled in. */
    VGPU_MSG_WANT = 4,      /* tenant -> arbiter: work waits; turn.devices: bits of the devices it is for */
    VGPU_MSG_DONE = 5,      /* tenant -> arbiter: nothing of turn.number is left on the device; turn.flags: MORE */
    VGPU_MSG_GRANT = 6,     /* arbiter -> tenant: launch now */
    VGPU_MSG_REVOKE = 7,    /* arbiter -> tenant: launch no more, and say DONE when nothing is left */
    VGPU_MSG_ENDING = 8,    /* of older libvgpus, and ignored; 9 was theirs, too */
    VGPU_MSG_LOOK = 10,     /* arbiter -> tenant: see what state the lease is in, and write your slot's figures;
                          * vgpud -> arbiter: say so to all processes of this lease */
    VGPU_MSG_CUT = 11,      /* arbiter -> tenant: launch as you like, turns are kept by taking your channels off the
                             * device; with WATCH in turn.flags: say DONE when nothing is left to do, WANT at the
                             * next call */
    VGPU_MSG_CHANNELS = 12, /* tenant -> arbiter: the table of this process's channels has changed */
    /* control socket, root only */
    VGPU_MSG_ADD = 16,    /* vgpud -> arbiter: serve this lease */
    VGPU_MSG_REMOVE = 17, /* vgpud -> arbiter: stop serving it and forget it */
    VGPU_MSG_LIST = 18,   /* vgpud -> arbiter: the live processes of this lease */
    VGPU_MSG_OK = 19,
    VGPU_MSG_ERROR = 20, /* value: errno */
    VGPU_MSG_PROCESSES = 21,
};

#define VGPU_NO_SLOT 0xffffffffu /* no slot: not registered */

/* A turn on the devices. Lengths, not points in time: the two ends may be in different time namespaces. */
enum vgpu_turn_flags {
    VGPU_TURN_FREE = 1,   /* no other tenant is there: launch without pacing until revoked */
    VGPU_TURN_WATCH = 2,  /* give the devices back as soon as nothing is left to do */
    VGPU_TURN_MORE = 4,   /* in DONE: launches are waiting at the gate */
    VGPU_TURN_SHORT = 8,  /* a latency tenant must not wait: one long launch in flight at a time */
    VGPU_TURN_GATED = 32, /* in WANT: this process has no channels of its own, and keeps its turns by its gate */
    VGPU_TURN_BRIEF = 16, /* with WATCH: idleness is looked for more often: others wait for its end, or it wishes
                           * short turns */
};
#define VGPU_TURN_OPEN_ENDED UINT64_MAX

struct vgpu_turn {
    uint64_t number;
    uint64_t length_ns; /* GRANT: from its receipt; VGPU_TURN_OPEN_ENDED: until revoked. DONE: of it, how long
                         * nothing of the tenant ran */
    uint64_t window_ns; /* most device time to have in flight */
    uint32_t flags;     /* enum vgpu_turn_flags */
    uint32_t devices;
    uint64_t sent_ns; /* the sender's CLOCK_MONOTONIC: time on the way is charged to no tenant */
};

struct vgpu_message {
    uint32_t kind;
    uint32_t version;
    uint32_t slot;
    uint32_t owner;
    int64_t value;
    union {
        char allocation[VGPU_ID_BYTES];
        struct vgpu_turn turn;
    };
};

/* Answer to VGPU_MSG_LIST: host pids of the lease's live registered processes. head.slot: how often `usage` was larger
 * than it may be and was cut; head.owner: 1 if its locks are so many that the arbiter looks at them no more.
 * head.turn.flags: 1 if the driver refused to take it off a device or to put it back, so that its slices are kept by
 * its gate; head.turn.number is the status, head.turn.length_ns the errno of that call. */
struct vgpu_process_list {
    struct vgpu_message head; /* kind VGPU_MSG_PROCESSES, value: count */
    int32_t pids[VGPU_MAX_SLOTS];
};

_Static_assert(sizeof(struct vgpu_device_limits) == 88, "ABI");
_Static_assert(offsetof(struct vgpu_limits, devices) == 88, "ABI");
_Static_assert(offsetof(struct vgpu_limits, memory) == 1496, "ABI: all there was before it");
_Static_assert(sizeof(struct vgpu_slot_device) == 64, "one cache line a device");
_Static_assert(offsetof(struct vgpu_slot, devices) == 64, "device words stay on their own cache lines");
_Static_assert(offsetof(struct vgpu_usage, retired) == 128, "ABI");
_Static_assert(sizeof(struct vgpu_message) == 24 + VGPU_ID_BYTES, "ABI");
_Static_assert(sizeof(struct vgpu_compute) == 64, "one cache line a device");
_Static_assert(sizeof(struct vgpu_usage) <= VGPU_CHANNELS_AT && VGPU_CHANNELS_AT % 16384 == 0, "ABI: whole pages");
_Static_assert(sizeof(struct vgpu_channel_group) == 64, "ABI");
_Static_assert(sizeof(struct vgpu_channel_table) == 16384, "ABI: whole pages");

#endif

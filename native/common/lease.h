/*
 * lease.h: the shared-memory ABI by which vgpud, the arbiter and libvgpu limit and meter a preload allocation (one that
 * libvgpu enforces).
 *
 * A lease is the folder <run>/leases/<allocation>/ with these entries:
 *   limits        written by vgpud only; read-only to the tenant
 *   usage         written by the tenant's processes, the arbiter and vgpud; hostile input to the arbiter and vgpud
 *   arbiter.sock  SEQPACKET; a tenant process registers here, and its pid comes from SO_PEERCRED
 *   moved         after a move: written by vgpud (VGPU_MOVED_FILE)
 * <run>/leases/<allocation> may be a link to that folder, on a file system of its user (vgpud/lease/homes.py).
 * If the tenant's uid is not known (a pod), any user may write `usage`. Then only root may enter <allocation>/ (mode
 * 0700), and the entries are in <allocation>/anyone/, which is mounted into the containers.
 *
 * A slot of `usage` belongs to the process that holds the POSIX write lock (F_SETLK) on the slot's first byte. The
 * kernel drops that lock when the process dies, execs or closes its files, at any instruction. A slot without a lock
 * may be cleared, unless its process is still dying (dying.h), or has only closed its files (arbiter/process.h).
 * F_GETLK returns the holder's pid in the caller's pid namespace, so a restarted arbiter finds every process that holds
 * a lock by the kernel alone. A forked child does not inherit the lock.
 *
 * This header is the single source: vgpud/lease_layout.py is generated from it by layout.c. All words are little-endian
 * and naturally aligned; sizes are bytes; shares are hundredths of a percent.
 */
#ifndef VGPU_LEASE_H
#define VGPU_LEASE_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_LEASE_MAGIC 0x4c555056u /* "VPUL" in ASCII */
#define VGPU_LEASE_VERSION 1u

#define VGPU_MAX_DEVICES 16u /* maximum of devices of one allocation */
#define VGPU_MAX_SLOTS 256u  /* maximum of concurrent processes of one allocation */
#define VGPU_UUID_BYTES 64u  /* "GPU-..." or "MIG-...", NUL-terminated */
#define VGPU_ID_BYTES 64u    /* allocation id, NUL-terminated */
#define VGPU_CALL_BYTES 48u  /* name of a driver function, NUL-terminated; a longer one is truncated */
#define VGPU_SHARE_ALL 10000u

/*
 * Where a tenant finds its lease: at the fixed mount point, or else in the folder that the environment names. The
 * environment gives only the path, never a limit.
 */
#define VGPU_LEASE_MOUNT "/run/vgpu/lease"
#define VGPU_LEASE_ENV "VGPU_LEASE"
#define VGPU_LIMITS_FILE "limits"
#define VGPU_USAGE_FILE "usage"
#define VGPU_ARBITER_SOCKET "arbiter.sock"
/*
 * In a container the lease's folder is mounted read-only, and the `usage` file is mounted writable at this path. A
 * mount below the folder's would fail in a user namespace: the runtime opens the parent of each mount, and the
 * container's root may not list the folder.
 */
#define VGPU_USAGE_MOUNT "/run/vgpu/usage"
#define VGPU_MOVED_FILE "moved" /* file that vgpud writes after a move (relocated.h) */
#define VGPU_ANYONE_FOLDER "anyone"

/* What happens at the limit of the compute share. The values are part of the ABI. */
enum vgpu_share_policy {
    VGPU_SHARE_NONE = 0,            /* no compute limit */
    VGPU_SHARE_HARD = 1,            /* the tenant gets no more than its share, even alone */
    VGPU_SHARE_WORK_CONSERVING = 2, /* the tenant may use idle time of others */
};

enum vgpu_lease_state {
    VGPU_LEASE_OPEN = 1,
    /* the allocation is released: existing memory stays until it is freed, and nothing new is granted */
    VGPU_LEASE_CLOSED = 2,
    /* the allocation is suspended: a process with work reports it (slot.wants), and waits until the lease is open */
    VGPU_LEASE_SUSPENDED = 3,
};

/*
 * Where the memory that libvgpu can move (evictable.h) must be. Plain allocations are movable in a lease of one device
 * whose policy makes memory evictable.
 */
enum vgpu_lease_memory {
    VGPU_MEMORY_FIXED = 0, /* there is no movable memory: plain allocations are the driver's own */
    VGPU_MEMORY_HERE = 1,  /* movable memory is on the device */
    /*
     * movable memory leaves the device, except for a part (keep_share), while the lease is suspended; each process
     * reports its progress in its slot
     */
    VGPU_MEMORY_OUT = 2,
    /* movable memory is on the device, and host buffers are prepared, because OUT is likely to follow */
    VGPU_MEMORY_SOON = 3,
};

/* What the driver does with a process after libvgpu has evicted its memory. */
enum vgpu_lease_saves {
    VGPU_SAVES_NOTHING = 0,
    /*
     * the driver saves the process next (a checkpoint), so libvgpu unlocks its host buffers, also after an eviction that
     * was ordered without this
     */
    VGPU_SAVES_REST = 1,
    /*
     * the driver saves the process next, and restores it on another device that can reach this one; so the memory may
     * be parked (below)
     */
    VGPU_SAVES_PARKED = 2,
};

/* The limits on one device of the lease. */
struct vgpu_device_limits {
    char uuid[VGPU_UUID_BYTES]; /* the device; it changes with a move, while the entry stays that of the same slice */
    uint64_t memory_bytes;      /* memory limit, contexts and modules included */
    uint32_t share;             /* compute share in hundredths of a percent, 1 to 10000 */
    uint32_t share_policy;      /* enum vgpu_share_policy */
    int32_t priority;           /* priority: higher values come first */
    uint32_t reserved;          /* always zero */
};

/*
 * The `limits` file. vgpud rewrites it in place under a sequence lock: generation is odd during a write. A reader
 * copies the body between two equal, even reads of generation (acquire). After many failed attempts the reader keeps
 * its last valid copy.
 */
struct vgpu_limits {
    uint32_t magic;
    uint32_t version;
    uint64_t generation;
    char allocation[VGPU_ID_BYTES];
    uint32_t state; /* enum vgpu_lease_state */
    uint32_t device_count;
    struct vgpu_device_limits devices[VGPU_MAX_DEVICES];
    uint32_t memory; /* enum vgpu_lease_memory; zero in the page of an older vgpud */
    /*
     * the part of each process's movable memory that may stay on the device while it is OUT, in hundredths of a
     * percent (while it is SOON: the part for which no host buffers are prepared); zero in the page of an older vgpud
     */
    uint32_t keep_share;
    /*
     * 1: the engine cut keeps the tenant off its devices, and its memory stays there; only the arbiter reads this word
     */
    uint32_t paused;
    uint32_t saves; /* enum vgpu_lease_saves */
};

/* Length of the page that a vgpud without the field `memory` writes. */
#define VGPU_LIMITS_BYTES_LEAST offsetof(struct vgpu_limits, memory)

/* A process's memory and counters on one device. Only that process writes these words, until its slot is cleared. */
struct vgpu_slot_device {
    uint64_t used_bytes;    /* bytes held by API allocations, in units of the driver's pages */
    uint64_t claim_bytes;   /* bytes claimed by driver calls in progress (account.h) */
    uint64_t context_bytes; /* bytes of contexts, modules, local memory and streams, as measured by NVML */
    uint64_t peak_bytes;
    uint64_t refusals_limit; /* number of requests that were refused because of this lease's limit */
    uint64_t refusals_card;  /* number of requests that the driver refused because the card itself is full */
    uint64_t launches;
    uint64_t throttled_ns;
};

/*
 * Owner word of a slot. 0: the slot is free. VGPU_OWNER_SELF: a process has claimed it, and is not registered yet.
 * Otherwise it is the registration number from the arbiter. Sums count every slot, whatever its owner word is.
 */
#define VGPU_OWNER_SELF 0x80000000u

/*
 * Parked memory: while the driver moves a process to another device, libvgpu keeps the evictable memory in blocks on
 * the old device, by exported descriptors alone. After the move libvgpu makes blocks of the same sizes on the new
 * device. It writes the pairs of descriptors to a sealed memory file. vgpud has the blocks copied in order, and writes to
 * the file how many are copied, and at the end the result. The file is hostile input.
 */
#define VGPU_PARKED_MAGIC 0x4b505056u /* "VPPK" in ASCII */
#define VGPU_PARKED_MAX 4096u         /* maximum of blocks of a process */
#define VGPU_PARKED_ASKED UINT32_MAX
struct vgpu_parked_block {
    int32_t from; /* descriptors of the process: the block on the old device, and its pair on the new device */
    int32_t to;
    uint64_t bytes;
};
struct vgpu_parked_list {
    uint32_t magic;
    uint32_t count;  /* number of blocks, which follow */
    uint32_t result; /* VGPU_PARKED_ASKED until vgpud has copied the blocks or failed; then a CUresult */
    uint32_t copied; /* number of blocks copied so far */
};

/* How far a process's memory has followed the lease's request. */
enum vgpu_swap_phase {
    VGPU_SWAP_HERE = 0,
    VGPU_SWAP_DRAINING = 1, /* the process waits for running work; nothing has moved yet */
    VGPU_SWAP_GOING = 2,
    VGPU_SWAP_OUT = 3,
    VGPU_SWAP_COMING = 4,
    VGPU_SWAP_REFUSED = 5, /* the memory could not be moved, and is on the device again */
};
#define VGPU_SWAP_KEPT_SHIFT 8
/* added to OUT: the process is ready for the driver to save it (vgpu_lease_saves) */
#define VGPU_SWAP_READY (1u << 31)

/*
 * Size of a step by which the host buffer grows ahead of an eviction. An eviction waits for the end of a step in
 * progress.
 */
#define VGPU_PREPARE_STEP_BYTES (256 << 20)
/*
 * If the host buffer lacks less than a step, and at most 1/VGPU_PREPARED_PART of its needed size, it does not grow
 * ahead: the eviction itself makes the rest. Memory that grows little by little would otherwise use up the segments of
 * the buffer.
 */
#define VGPU_PREPARED_PART 16

/*
 * Kinds of memory that libvgpu cannot evict. Two kinds have no entry here: physical memory of the program (physical.h),
 * and memory whose size libvgpu measures, because no request gives it (contexts, modules, arrays).
 */
enum vgpu_stay {
    VGPU_STAY_PLAIN = 0, /* small pieces that share pages, and larger ones that libvgpu could not make evictable */
    VGPU_STAY_POOLS = 1,
    VGPU_STAY_MANAGED = 2,
    VGPU_STAY_GRAPHS = 3,
};
#define VGPU_STAY_KINDS 4u

struct vgpu_slot {
    uint32_t owner;
    int32_t pid;       /* pid in the process's own namespace: for information, never trusted */
    uint64_t start_ns; /* time of the claim, in CLOCK_MONOTONIC */
    /* `calls`, `looks`, `busy` and `quiet` are brought up to date when the arbiter sends LOOK. */
    /* number of launches (by weight: launch.c), copies, synchronisations and allocations */
    uint64_t calls;
    uint32_t looks; /* number of times that the process has brought `calls`, `busy` and `quiet` up to date */
    uint32_t busy;  /* 1: the process's work on the devices has not finished */
    /*
     * 1: the lease is suspended, and the process has no work on the device. libvgpu then calls the driver only to move
     * memory
     */
    uint32_t quiet;
    uint32_t wants; /* number of threads that wait until the lease is open again; always up to date */
    /*
     * enum vgpu_swap_phase in the low byte. Above it, while OUT, the MiB of movable memory that are still on the
     * device (and VGPU_SWAP_READY); while COMING, the descriptor of a list of parked blocks to copy, or 0; while HERE,
     * the number of blocks that the process still has on the device that it has left. One word, so that its values are
     * consistent
     */
    uint32_t swap_phase;
    uint32_t swap_error;    /* CUresult of an eviction that failed, or of the error that delays a swap-in; 0: none */
    uint64_t movable_bytes; /* movable bytes of the process's memory, on device or host */
    uint64_t host_bytes;    /* bytes of host memory reserved for the movable memory */
    struct vgpu_slot_device devices[VGPU_MAX_DEVICES];
};

/* Compute time of the whole lease on one device, in nanoseconds. Only the arbiter writes it. */
struct vgpu_compute {
    uint64_t granted_ns; /* sum of the lengths of the tenant's time slices, whether it used them or not */
    /*
     * device time that was charged to the tenant: the time of its slices, less idle time in them, and its part of the
     * time that it shared with others
     */
    uint64_t used_ns;
    uint64_t waited_ns;  /* time for which the tenant waited for time slices on the device */
    uint64_t overrun_ns; /* time in which the tenant held the device after the end of a slice */
    uint64_t turns;
    /*
     * number of slices that did not end within the drain timeout, so that the next tenant was admitted beside this one
     */
    uint64_t bypasses;
    uint64_t reserved[2];
};

/* The `usage` file. */
struct vgpu_usage {
    uint32_t magic;
    uint32_t version;
    uint32_t slot_high;                     /* slots from this index on have never been used */
    uint32_t context_mib[VGPU_MAX_DEVICES]; /* memory of a context at the last measurement, in MiB; 0: not measured */
    /* number of functions (cu...) that the loaded driver exports and libvgpu does not know */
    uint32_t unknown_calls;
    char unknown_call[VGPU_CALL_BYTES];                /* the name of one unknown function, NUL-terminated */
    struct vgpu_slot_device retired[VGPU_MAX_DEVICES]; /* counters of ended processes; only the arbiter writes them */
    struct vgpu_slot slots[VGPU_MAX_SLOTS];
    struct vgpu_compute compute[VGPU_MAX_DEVICES];
};

/*
 * The channels that carry a process's kernels, for an arbiter that preempts tenants by a call of the driver (rm.h). At
 * VGPU_CHANNELS_AT of the `usage` file there is one table for each slot. The slot's process writes it when the driver
 * schedules or frees channels. A shorter file has no tables. Every number in a table is the tenant's claim: the arbiter
 * makes its call on the tenant's own open file, and the driver refuses channels of other files.
 */
#define VGPU_GROUP_CHANNELS 8u
#define VGPU_MAX_GROUPS 255u
struct vgpu_channel_group {
    uint8_t uuid[16]; /* UUID of the device, as the driver reports it */
    uint32_t file;    /* the process's descriptor of its open control device */
    uint32_t client;  /* handles of the driver (rm.h) */
    uint32_t subdevice;
    uint32_t count; /* number of channels; a group with more channels has several entries */
    uint32_t channels[VGPU_GROUP_CHANNELS];
};
struct vgpu_channel_table {
    uint64_t generation; /* the generation is odd during a write */
    uint32_t count;
    uint32_t lost; /* 1: some groups are not in this table */
    /* devices of the lease, as bits, on which the arbiter has disabled or is disabling the table's channels */
    uint32_t off;
    /* number of milliseconds on the device for which the process has sampled whether its work was unfinished */
    uint32_t samples;
    /*
     * how many of the `samples` milliseconds had unfinished work. It is the process's claim, and only
     * decides whether other tenants run beside it
     */
    uint32_t unfinished;
    /*
     * the devices of `off` for which the arbiter is disabling or enabling the channels: if the arbiter ends meanwhile,
     * the channels may be in either state
     */
    uint32_t doubtful;
    /* MiB of memory that an eviction leaves on the device, by enum vgpu_stay; the slot has no room for these words */
    uint32_t stays_mib[VGPU_STAY_KINDS];
    /* how many of the `samples` milliseconds a thread waited inside of the same call; a claim, as `unfinished` */
    uint32_t waiting;
    uint8_t unused[12];
    struct vgpu_channel_group groups[VGPU_MAX_GROUPS];
};
#define VGPU_CHANNELS_AT 294912u /* offset of the first channel table in the file, at a page boundary */
#define VGPU_USAGE_FILE_BYTES (VGPU_CHANNELS_AT + VGPU_MAX_SLOTS * sizeof(struct vgpu_channel_table))

/* Messages on arbiter.sock (SEQPACKET, one struct per packet). */
enum vgpu_message_kind {
    VGPU_MSG_REGISTER = 1, /* tenant -> arbiter: registers; slot is the slot whose lock the sender holds */
    VGPU_MSG_WELCOME = 2,  /* arbiter -> tenant: registered; owner is the word for the slot, value the host pid */
    VGPU_MSG_REFUSED = 3,  /* arbiter -> tenant: not registered; value is an errno (ESHUTDOWN: the lease is closed) */
    /* Time slices, on a registered connection. `turn` is filled in. */
    VGPU_MSG_WANT = 4, /* tenant -> arbiter: launches wait; turn.devices has their devices, as bits */
    /* tenant -> arbiter: no work of slice turn.number is left on the device; turn.flags may have MORE */
    VGPU_MSG_DONE = 5,
    VGPU_MSG_GRANT = 6,  /* arbiter -> tenant: launches may run now */
    VGPU_MSG_REVOKE = 7, /* arbiter -> tenant: stop launching, and send DONE when no work is left */
    VGPU_MSG_ENDING = 8, /* older versions of libvgpu send this message, and number 9; the arbiter ignores both */
    /*
     * arbiter -> tenant: the process must read the lease's state, and write the words of its slot; vgpud -> arbiter:
     * send this to all processes of the lease
     */
    VGPU_MSG_LOOK = 10,
    /*
     * arbiter -> tenant: the process may launch at any time, because the arbiter enforces slices by disabling its
     * channels; with WATCH in turn.flags: send DONE when no work is left, and WANT at the next call
     */
    VGPU_MSG_CUT = 11,
    VGPU_MSG_CHANNELS = 12, /* tenant -> arbiter: this process's table of channels has changed */
    /* Messages on the control socket, for root only. */
    VGPU_MSG_ADD = 16,    /* vgpud -> arbiter: serve this lease */
    VGPU_MSG_REMOVE = 17, /* vgpud -> arbiter: stop serving this lease */
    VGPU_MSG_LIST = 18,   /* vgpud -> arbiter: asks for the live processes of this lease; the answer is PROCESSES */
    VGPU_MSG_OK = 19,
    VGPU_MSG_ERROR = 20, /* the answer of a failed order; value is an errno */
    VGPU_MSG_PROCESSES = 21,
};

#define VGPU_NO_SLOT 0xffffffffu /* the value of a slot number that names no slot */

/*
 * Flags of a time slice (struct vgpu_turn). A slice has lengths and not points in time (except sent_ns), because the
 * two sides may be in different time namespaces.
 */
enum vgpu_turn_flags {
    VGPU_TURN_FREE = 1,   /* the devices need no time slices: launch without pacing until revoked */
    VGPU_TURN_WATCH = 2,  /* give the devices back as soon as no work is left */
    VGPU_TURN_MORE = 4,   /* flag of DONE: further launches wait at the gate */
    VGPU_TURN_GATED = 32, /* flag of WANT: this process has no channels in the table, so its gate enforces its slices */
    /* flag beside WATCH: check for idleness more often, because this tenant's work preempts that of others */
    VGPU_TURN_BRIEF = 16,
};
#define VGPU_TURN_OPEN_ENDED UINT64_MAX

struct vgpu_turn {
    uint64_t number;
    /*
     * In GRANT: length of the slice from its receipt; VGPU_TURN_OPEN_ENDED: until revoked. In DONE: for how long none
     * of the process's work has run
     */
    uint64_t length_ns;
    uint64_t window_ns; /* maximum of device time that may be in flight */
    uint32_t flags;     /* enum vgpu_turn_flags */
    uint32_t devices;
    uint64_t sent_ns; /* the sender's CLOCK_MONOTONIC, so that time in transit is charged to no tenant */
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

enum vgpu_list_flags {
    /* the driver refused to preempt or resume the lease's work, so the gate enforces its slices */
    VGPU_LIST_REFUSED = 1,
    VGPU_LIST_PAUSED = 2, /* the lease is paused, and all of its processes are off its devices */
    VGPU_LIST_LINKS = 4,  /* this arbiter serves a lease whose folder is a link; also in an answer ERROR */
};
/*
 * Answer to VGPU_MSG_LIST: host pids of the lease's live registered processes. head.slot: how often `usage` was too
 * large and was truncated. head.owner: 1 if the file has so many locks that the arbiter no longer checks them.
 * head.turn.flags: enum vgpu_list_flags; with VGPU_LIST_REFUSED, head.turn.number is the status and head.turn.length_ns
 * the errno of the refused call.
 */
struct vgpu_process_list {
    struct vgpu_message head; /* kind is VGPU_MSG_PROCESSES, value the number of pids */
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

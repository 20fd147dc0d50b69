/*
 * The shared state of one simulated node: one file that every process maps.
 *
 * The layout is private to this folder and is defined only in this header. The Python tool never reads the file; it
 * runs `vgpu-simctl` (tools/simctl.c), which is compiled with this header.
 *
 * Two rules keep the state correct when a process is killed at any instruction. What a process holds is written only
 * into that process's own entry (sim_proc), and totals are summed from the entries of the living processes at each
 * query. Mutexes are robust, and an instance becomes valid by one last store of `used`.
 */
#ifndef VGPU_SIM_STATE_H
#define VGPU_SIM_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define SIM_MAGIC UINT64_C(0x314d495355504756) /* the bytes "VGPUSIM1" */
#define SIM_LAYOUT_VERSION 8u
#define SIM_ENV_STATE "VGPU_SIM_STATE"
#define SIM_NONE (-1)
#define SIM_PAGE_BYTES (UINT64_C(2) << 20) /* device memory is charged in 2 MiB pages */

enum {
    SIM_MAX_DEVICES = 16,
    SIM_MAX_GI_PROFILES = 17, /* equals NVML_GPU_INSTANCE_PROFILE_COUNT */
    SIM_MAX_PLACEMENTS = 8,
    SIM_MAX_GIS = 15, /* 8 + 4 + 2 + 1: one id for each aligned range in 8 memory slices */
    SIM_MAX_CIS = 8,
    SIM_MAX_PROCS = 512,
    SIM_MAX_USES = 16,
    SIM_MAX_ACTIVE = 256,
    SIM_MAX_FAULTS = 32,
    SIM_MAX_EVENTS = 64,
    SIM_MAX_SHARED_EVENTS = 256,
    SIM_MAX_ACCOUNTS = 4000, /* size of NVML's accounting buffer */
    SIM_SEGMENTS = 32,
    SIM_BUCKETS = 16,
    SIM_MAX_WALLS = 256,
    SIM_GROUP_PATH = 256,
    SIM_MAX_OBJECTS = 4096, /* objects of one process: enough for about 128 contexts */
};
#define SIM_NO_LIMIT UINT64_MAX /* equals NVML_DEVICE_MEMORY_LIMIT_MAX */
/* duration of one of the 8 buckets over which utilisation is averaged: together one second */
#define SIM_BUCKET_NS UINT64_C(125000000)

enum sim_kind { SIM_CONTEXT, SIM_PLAIN, SIM_VMM, SIM_POOL, SIM_ARRAY, SIM_GREEN, SIM_MANAGED, SIM_KINDS };

enum sim_fault_action { SIM_FAULT_ERROR = 1, SIM_FAULT_HANG, SIM_FAULT_SLOW, SIM_FAULT_MISSING };

struct sim_placement {
    uint32_t start, size; /* first memory slice, and number of memory slices, of a GPU instance's place */
};

struct sim_gi_profile {
    uint32_t used, nvml_profile, id, slice_count, instance_count, sm_count;
    uint32_t copy_engines, decoders, encoders, jpegs, ofas, capabilities;
    uint32_t placement_count;
    uint64_t memory_mib;
    struct sim_placement placements[SIM_MAX_PLACEMENTS];
    char name[64];
};

/*
 * A run of a queue (history.c). At the time at_ns, the queue had completed `done` of its work. From then on it
 * completed `rate` of work per nanosecond, or if period_ns > 0, `chunk` of work in each period. Work is measured in
 * nanoseconds of the engine's undivided time.
 */
struct sim_segment {
    uint64_t at_ns, period_ns;
    double done, rate, chunk;
};

struct sim_queue {
    double submitted, done;
    uint32_t segment_count; /* number of segments ever begun; the last SIM_SEGMENTS of them are kept */
    uint32_t active;
    struct sim_segment segments[SIM_SEGMENTS];
    uint64_t bucket_epoch[SIM_BUCKETS];
    uint64_t bucket_ns[SIM_BUCKETS];
    uint64_t last_launch_ns;
};

/* What one process uses of one device or MIG compute instance. */
struct sim_use {
    uint32_t used;
    _Atomic uint32_t device;   /* a move of the queue writes it under the lock of the engine that the queue leaves */
    uint32_t suspended_device; /* the device at the time of the checkpoint */
    int32_t gi, ci;            /* GPU instance and compute instance; SIM_NONE outside MIG */
    _Atomic uint32_t contexts;
    uint32_t mps;        /* 1: the process uses the device through an MPS server */
    double mps_fraction; /* the process's fraction of the SMs, 0 to 1 */
    uint64_t bytes[SIM_KINDS];
    uint64_t peak_bytes;
    struct sim_queue queue; /* guarded by the engine lock of the device, as are the fields below */
    /* number of channels that can compute, and how many of them are disabled; the queue stops when all are disabled */
    uint32_t channels, channels_off;
    uint32_t channels_repeated; /* number of times that a disabled channel was disabled again */
    _Atomic uint32_t on_wake;   /* a futex: its value changes when the queue continues */
};

/* An object of a process's resource-manager client (rm.c). */
struct sim_object {
    uint32_t handle, parent, class_id; /* handle 0: the entry is free */
    uint8_t use;                       /* index of the process's use of the device to which the object belongs */
    uint8_t computes;                  /* 1: a channel of a group that has a compute object */
    uint8_t off;                       /* a channel: number of times that it must be enabled before it works */
    uint8_t unscheduled;               /* 1: a channel of a group that was scheduled without `enable` */
};

/* The CUprocessState in the low bits of sim_proc.gate; the high bits count the moves to other devices. */
enum sim_gate { SIM_RUNNING, SIM_LOCKED, SIM_CHECKPOINTED, SIM_FAILED, SIM_GATE_STATES };
/* Whether a process shares memory by cuIpc*, from the easiest to suspend to the hardest. */
enum sim_sharing { SIM_SHARES_NOT, SIM_SHARES_IN_JOB, SIM_SHARES };

struct sim_proc {
    _Atomic uint32_t used;
    _Atomic uint32_t gate;                      /* a futex: calls that wait at the gate wake when its value changes */
    uint32_t restore_broken;                    /* 1: a restore ran out of memory, so no later restore succeeds */
    uint32_t cannot_suspend;                    /* 1: the process has memory that it shares with other processes */
    uint32_t shares_by_ipc;                     /* enum sim_sharing */
    uint8_t card_of[SIM_MAX_DEVICES];           /* for each card, the card that does its work now */
    uint8_t suspended_card_of[SIM_MAX_DEVICES]; /* card_of at the time of the checkpoint */
    uint32_t pid;
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: distinguishes processes with the same pid */
    uint64_t first_seen_us;
    struct sim_use uses[SIM_MAX_USES];
    _Atomic uint32_t rm_client;                 /* handle of the process's resource-manager client; 0: none */
    uint32_t object_high;                       /* the entries from this index on were never used */
    struct sim_object objects[SIM_MAX_OBJECTS]; /* guarded by sim_lock */
};

/*
 * One engine: a whole card, or one compute instance. `active` holds the queues with pending work in the order of their
 * turns; the first queue has the engine.
 */
struct sim_engine {
    uint64_t last_ns;
    uint64_t ready_ns;     /* time at which the context switch to the holder is complete */
    uint64_t slice_end_ns; /* time until which the holder keeps the engine */
    uint32_t holder;       /* key (rotation.c) of the last holder */
    uint32_t active_count;
    uint32_t active[SIM_MAX_ACTIVE]; /* each entry is proc * SIM_MAX_USES + use */
    uint64_t bucket_epoch[SIM_BUCKETS];
    uint64_t bucket_ns[SIM_BUCKETS];
    double busy_ns_total;
};

struct sim_ci {
    uint32_t used, profile, slice_count, sm_count, start;
    uint32_t minor;
};

struct sim_gi {
    uint32_t used, profile; /* profile: an index into gi_profiles */
    struct sim_placement placement;
    uint32_t minor;
    struct sim_ci cis[SIM_MAX_CIS];
};

/* NVML's accounting record of a process that has ended. */
struct sim_account {
    uint32_t pid, gpu_percent;
    uint64_t peak_bytes, started_us, lasted_ms;
};

struct sim_device {
    /* The fields below are set by the profile and never change. */
    char name[96], uuid[48], serial[32], vbios[32], board_part[64], gpu_part[32];
    char inforom_image[32];
    uint32_t brand, architecture, cc_major, cc_minor, sm_count, core_count, minor, board_id;
    uint32_t pci_domain, pci_bus, pci_device, pci_device_id, pci_subsystem_id;
    uint32_t numa_node, numa_node_reported, virtualization_mode, module_id;
    uint32_t memory_bus_width_bits, pcie_generation, pcie_width;
    uint32_t power_limit_mw, power_min_mw, power_max_mw, power_idle_mw;
    uint32_t temperature_c, temperature_shutdown_c, temperature_slowdown_c, temperature_max_c;
    uint32_t clock_idle_mhz, clock_graphics_mhz, clock_memory_mhz, clock_video_mhz;
    uint32_t ecc, nvlink_count, nvlink_version, l2_cache_bytes, multi_processor_threads;
    uint32_t shared_memory_per_sm_bytes, shared_memory_optin_bytes, async_engines;
    uint64_t memory_total, memory_reserved, bar1_total;
    uint64_t context_bytes, context_mps_bytes, green_context_bytes;
    double kernel_us, timeslice_us, context_switch_us;
    /*
     * Durations of the calls on channels: from the disabling call until the channels stop, until that call returns, and
     * of an enabling call.
     */
    double channels_stop_us, channels_off_us, channels_on_us;
    uint32_t mig_capable, mig_needs_reset, mig_persists_reboot, memory_slices;
    uint32_t sm_per_slice;
    uint32_t gi_profile_count;
    struct sim_gi_profile gi_profiles[SIM_MAX_GI_PROFILES];
    /* The fields below change while the node runs. */
    uint32_t compute_mode, persistence, accounting, mig_current, mig_pending;
    uint32_t lost;            /* 1: the device has fallen off the bus */
    uint32_t recovery_action; /* an nvmlDeviceGpuRecoveryAction_t; a reset or a reboot clears it */
    /* row remapping because of uncorrectable errors */
    uint32_t rows_remapped, rows_pending, rows_failed, banks_pending;
    uint64_t hidden_bytes;  /* injected fault: memory that no process uses and that cannot be allocated */
    uint64_t account_count; /* number of records ever made; the last SIM_MAX_ACCOUNTS of them are kept */
    struct sim_account accounts[SIM_MAX_ACCOUNTS];
    struct sim_gi gis[SIM_MAX_GIS];
    pthread_mutex_t rm_lock; /* serialises the calls that disable or enable channels, as the driver does */
    pthread_mutex_t engine_lock;
    uint32_t engine_torn; /* 1: the owner of the lock was killed, so the engines' lists must be rebuilt */
    struct sim_engine whole;
    struct sim_engine mig_engines[SIM_MAX_GIS][SIM_MAX_CIS];
};

struct sim_fault {
    uint32_t used, action;
    char function[64];
    uint32_t code;
    int32_t remaining;        /* number of calls that still get the fault; negative: all */
    uint32_t device_plus_one; /* device index plus one; 0: every device */
    uint32_t delay_us;
};

/*
 * A CUDA event that other processes open by a handle: the queue that last recorded the event, and the position in that
 * queue.
 */
struct sim_shared_event {
    _Atomic uint32_t used;
    uint32_t owner_pid, proc, use;
    uint64_t id, owner_ticks, proc_ticks;
    double position; /* negative: no queue has recorded the event */
};

/* The memory limit of a control group on one device. The limit is valid while the group's folder has this inode. */
struct sim_wall {
    uint32_t used, device;
    uint64_t inode, soft, hard;
    char path[SIM_GROUP_PATH];
};

struct sim_event {
    uint64_t sequence, type, data;
    uint32_t device;
    int32_t gi, ci;
};

struct sim_state {
    uint64_t magic;
    uint32_t layout_version, device_count;
    uint64_t size;
    pthread_mutex_t lock;
    char profile[64], driver_version[32], nvml_version[48];
    uint32_t cuda_version, caps_minor_base;
    uint64_t boot_count, next_event;
    uint32_t rm_clients; /* number of resource-manager clients ever made */
    _Atomic uint32_t fault_count;
    _Atomic uint32_t event_wake; /* a futex: its value changes with every event */
    _Atomic uint32_t proc_high;  /* the entries from this index on were never used */
    /*
     * The mutex of each process entry, which the thread that claimed the entry holds as long as the thread lives. The
     * mutexes are robust, so the kernel itself marks the entries of killed processes. They are one array, because every
     * query reads all of them.
     */
    pthread_mutex_t alive[SIM_MAX_PROCS];
    struct sim_fault faults[SIM_MAX_FAULTS];
    struct sim_event events[SIM_MAX_EVENTS];
    _Atomic uint32_t has_walls; /* 1: a limit was set since the node was made */
    struct sim_wall walls[SIM_MAX_WALLS];
    struct sim_shared_event shared_events[SIM_MAX_SHARED_EVENTS];
    uint64_t next_shared_event;
    uint8_t links[SIM_MAX_DEVICES][SIM_MAX_DEVICES];    /* number of NVLinks between two devices */
    uint8_t topology[SIM_MAX_DEVICES][SIM_MAX_DEVICES]; /* each entry is an nvmlGpuTopologyLevel_t */
    struct sim_device devices[SIM_MAX_DEVICES];
    struct sim_proc procs[SIM_MAX_PROCS];
};

/* Functions of state.c: the mapping, the lock, the processes. */
/* attaches to the node that the environment names; NULL: no node */
struct sim_state *sim_attach(void);
struct sim_state *sim_attach_path(const char *path); /* returns NULL with errno on failure */
struct sim_state *sim_create_path(const char *path); /* makes a zeroed state with initialised mutexes */
const char *sim_state_path(void);                    /* path of the state file of the attached node, or "" */
void sim_lock(struct sim_state *s);
void sim_unlock(struct sim_state *s);
void sim_engine_lock(struct sim_device *d);
void sim_engine_unlock(struct sim_device *d);
void sim_rm_lock(struct sim_device *d);
void sim_rm_unlock(struct sim_device *d);
int sim_open_state(void);       /* opens the state file of the attached node once more; -1 with errno on failure */
bool sim_is_state_file(int fd); /* returns true if fd is the state file of the attached node */
uint64_t sim_now_ns(void);      /* time of CLOCK_MONOTONIC */
uint64_t sim_wall_us(void);     /* time of CLOCK_REALTIME, as in NVML's time stamps */
uint64_t sim_start_ticks(uint32_t pid, char *run_state);
int sim_branch(const struct sim_state *s); /* the driver's branch: 580 of 580.159.04 */
bool sim_parse_unsigned(const char *text, unsigned long long *value);

/* Functions of process.c: entries, sweeping, sums. The caller holds sim_lock unless a comment says otherwise. */
struct sim_proc *sim_proc_self(struct sim_state *s); /* claims an entry for this process; NULL: the table is full */
void sim_proc_release(struct sim_state *s, struct sim_proc *p);
void sim_sweep(struct sim_state *s);
struct sim_use *sim_use_find(struct sim_proc *p, uint32_t device, int gi, int ci);
struct sim_use *sim_use_get(struct sim_proc *p, uint32_t device, int gi, int ci);
/* bytes of the use on its device; managed memory does not count */
uint64_t sim_use_bytes(const struct sim_use *u);
uint64_t sim_used_bytes(struct sim_state *s, uint32_t device, int gi); /* gi SIM_NONE: all instances */
uint64_t sim_capacity_bytes(const struct sim_state *s, uint32_t device, int gi);
bool sim_in_use(struct sim_state *s, uint32_t device, int gi, int ci);
struct sim_proc *sim_proc_find(struct sim_state *s, uint32_t pid); /* entry of a living process, or NULL */
/* returns true if the process is alive and not checkpointed: its memory then counts on the devices */
bool sim_proc_holds(const struct sim_proc *p);

/*
 * memory.c: adds bytes to a use that belongs to this process. Returns false if the device, or the limit of a control
 * group, has no room for them; managed memory always has room. The caller holds sim_lock.
 */
bool sim_use_take(struct sim_state *s, struct sim_use *u, enum sim_kind kind, uint64_t bytes);

/*
 * Functions of checkpoint.c, which lock a process, take it off its devices, and bring it back. Results are CUresult
 * values. The process's state changes by one store, so a caller that is killed half-way leaves the old or the new
 * state.
 */
int sim_checkpoint_lock(struct sim_state *s, uint32_t pid, uint32_t most_ms); /* most_ms 0: no time limit */
int sim_checkpoint_save(struct sim_state *s, uint32_t pid);
int sim_checkpoint_unlock(struct sim_state *s, uint32_t pid);
/* `card_of`, if not NULL, has for each card its target; SIM_MAX_DEVICES: not named. */
int sim_checkpoint_restore(struct sim_state *s, uint32_t pid, const uint8_t *card_of);
bool sim_gate_shut(const struct sim_proc *p);
void sim_gate_wait(struct sim_proc *p); /* waits while the gate is shut */
static inline enum sim_gate sim_gate_of(uint32_t gate)
{
    return (enum sim_gate)(gate % SIM_GATE_STATES);
}

/* Functions of engine.c: which queue computes at what time. */
struct sim_engine *sim_engine_of(struct sim_device *d, int gi, int ci);
double sim_engine_submit(struct sim_state *s, struct sim_proc *p, struct sim_use *u, double work_ns);
bool sim_engine_reached(struct sim_state *s, struct sim_use *u, double position, uint64_t *at_ns);
/* Completes all work before the position. Returns false if it is not complete because the queue stands still. */
bool sim_engine_release(struct sim_state *s, struct sim_use *u, double position);
bool sim_engine_idle(struct sim_state *s, struct sim_use *u); /* returns true if all work of this queue is done */
#define SIM_STANDS (-1.0)
/*
 * Returns the nanoseconds until the position is reached if no other work comes, or until the next check (rotation.c); 0
 * if it is reached; SIM_STANDS while the channels are disabled.
 */
double sim_engine_left(struct sim_state *s, struct sim_use *u, double position);
void sim_engine_wait(struct sim_state *s, struct sim_use *u, double position); /* Function of wait.c. */
void sim_engine_forget(struct sim_state *s, uint32_t ref, struct sim_use *u);
uint32_t sim_engine_percent(struct sim_device *d, struct sim_engine *e);
uint32_t sim_queue_percent(const struct sim_queue *q);
void sim_engine_advance(struct sim_state *s, struct sim_device *d, struct sim_engine *e);

/* Stops or continues the queue according to its channels. The caller holds the engine's lock. */
void sim_engine_channels(struct sim_state *s, uint32_t ref, struct sim_use *u);
static inline bool sim_use_stands(const struct sim_use *u)
{
    return u->channels > 0 && u->channels_off == u->channels;
}

/* Functions of rotation.c: the order of turns. The caller holds the engine's lock. */
void sim_rotate(struct sim_state *s, const struct sim_device *d, struct sim_engine *e, uint64_t now_ns);
double sim_rotation_left(struct sim_state *s, const struct sim_device *d, struct sim_engine *e, const struct sim_use *u,
                         double position); /* returns the nanoseconds until `position`, or until the next check */
void sim_rotation_leave(struct sim_engine *e, uint32_t ref);
/* rebuilds the engines' lists after an owner of the device's lock was killed */
void sim_rotation_mend(struct sim_state *s, struct sim_device *d);

/* Functions of history.c: past runs of a queue. */
#define SIM_WORK_EPSILON_NS 0.01
void sim_history_run(struct sim_queue *q, uint64_t at_ns, double rate, uint64_t slice_ns);
void sim_history_jump(struct sim_queue *q, uint64_t at_ns, double position);
uint64_t sim_history_when(const struct sim_queue *q, double position);
void sim_history_busy(uint64_t *epochs, uint64_t *sums, uint64_t from_ns, uint64_t to_ns, double share);
/* returns the busy part of the last second, in percent */
uint32_t sim_history_percent(const uint64_t *epochs, const uint64_t *sums);

/* Functions of mig.c: instances. They return nvmlReturn_t values. */
struct sim_ci_profile {
    uint32_t id, slice_count, instance_count, sm_count;
    char name[64];
};
const struct sim_gi_profile *sim_gi_profile_by_id(const struct sim_device *d, uint32_t id);
uint32_t sim_gi_remaining(const struct sim_device *d, const struct sim_gi_profile *p);
int sim_gi_create(struct sim_state *s, uint32_t device, uint32_t profile_id, const struct sim_placement *at,
                  uint32_t *gi);
int sim_gi_destroy(struct sim_state *s, uint32_t device, uint32_t gi);
bool sim_ci_profile(const struct sim_device *d, const struct sim_gi *g, uint32_t nvml_profile,
                    struct sim_ci_profile *out);
uint32_t sim_ci_placements(const struct sim_gi_profile *p, uint32_t slices, uint32_t *starts);
uint32_t sim_ci_remaining(const struct sim_device *d, const struct sim_gi *g, const struct sim_ci_profile *c);
int sim_ci_create(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci_profile_id,
                  const struct sim_placement *at, uint32_t *ci);
int sim_ci_destroy(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci);
int sim_mig_set_mode(struct sim_state *s, uint32_t device, uint32_t mode, int *activation);
void sim_mig_uuid(const struct sim_device *d, uint32_t gi, uint32_t ci, char out[48]);
void sim_device_reset(struct sim_state *s, uint32_t device);
void sim_reboot(struct sim_state *s);
void sim_post_event(struct sim_state *s, uint32_t device, int gi, int ci, uint64_t type, uint64_t data);
/* sleeps while event_wake has the value `seen`, at most `most_ns` */
void sim_event_sleep(struct sim_state *s, uint32_t seen, uint64_t most_ns);
void sim_account_end(struct sim_state *s, const struct sim_proc *p);
struct sim_account sim_account_of(const struct sim_proc *p, const struct sim_use *u);

/* rm.c: the control device /dev/nvidiactl, which the state file stands for: each open file of it may hold a client. */
bool sim_rm_is(struct sim_state *s, int fd);
int sim_rm_open(struct sim_state *s, struct sim_proc *p); /* opens a new file for the client of p; -1 with errno */
/* carries out the request as ioctl(2) of the real driver */
int sim_rm_ioctl(struct sim_state *s, int fd, unsigned long request, void *argument);
/* returns true if the client's file is still open in any process */
bool sim_rm_open_elsewhere(const struct sim_state *s, const struct sim_proc *p);
/* Returns true if an open file other than that of `fd` holds the lock of process p. */
bool sim_rm_held_by_another(const struct sim_state *s, const struct sim_proc *p, int fd);
/* forgets the process's client, after the process has ended and has left its engines */
void sim_rm_forget(struct sim_proc *p);

/*
 * Functions of wall.c: memory limits of control groups. The caller holds sim_lock. `path` is the group's folder, and
 * results are nvmlReturn_t values. sim_wall_left returns the bytes of a device that a process may still allocate, or
 * SIM_NO_LIMIT.
 */
int sim_wall_set(struct sim_state *s, uint32_t device, const char *path, uint64_t soft, uint64_t hard);
int sim_wall_get(struct sim_state *s, uint32_t device, const char *path, struct sim_wall *out, uint64_t *used);
uint64_t sim_wall_left(struct sim_state *s, uint32_t device, uint32_t pid);

/* Functions of hosttree.c: the files below <state>.root, such as proc/driver/nvidia. */
void sim_tree_write(struct sim_state *s);
void sim_tree_gi(struct sim_state *s, uint32_t device, uint32_t gi);
void sim_tree_ci(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci);

/*
 * Function of fault.c: returns the result that a fault gives to a call of `function`, after the fault's delay; 0: none.
 */
int sim_fault_check(struct sim_state *s, const char *function, int device);
/* returns true if a fault of all devices makes the function missing from the driver */
bool sim_fault_missing(struct sim_state *s, const char *function);
static inline int sim_fault(struct sim_state *s, const char *function, int device)
{
    if (atomic_load_explicit(&s->fault_count, memory_order_relaxed) == 0)
        return 0;
    return sim_fault_check(s, function, device);
}

#endif

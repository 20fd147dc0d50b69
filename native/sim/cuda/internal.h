/* Declarations that every part of the simulated driver uses: the process, contexts, handles, memory blocks. */
#ifndef VGPU_SIM_CUDA_INTERNAL_H
#define VGPU_SIM_CUDA_INTERNAL_H

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../state/state.h"

enum {
    CU_MAX_ORDINALS = 32,
    CU_LAUNCH_DEPTH = 1024,
    CU_PENDING_EVENTS = 64,
    CU_CHANNEL_GROUPS = 4,
    CU_SLAB_CLASSES = 12
};
#define CU_EXPORT __attribute__((visibility("default")))

/*
 * The first word of a handle's object, which identifies a live object of the right type. The objects of ended contexts
 * are kept for reuse, so a stale context handle never refers to freed memory; it is refused until a new context takes
 * the object.
 */
enum cu_magic {
    CU_DEAD = 0,
    CU_CONTEXT = 0x43545830,
    CU_STREAM = 0x53545230,
    CU_EVENT = 0x45565430,
    CU_MODULE = 0x4d4f4430,
    CU_FUNCTION = 0x464e4330,
    CU_ARRAY = 0x41525230,
    CU_MIPMAP = 0x4d495030,
    CU_POOL = 0x504f4f30,
    CU_LIBRARY = 0x4c494230,
    CU_GRAPH = 0x47524130,
    CU_NODE = 0x4e4f4430,
    CU_EXEC = 0x45584530,
    CU_OBJECT = 0x4f424a30,
    CU_GREEN = 0x47524e30,
    CU_DESCRIPTION = 0x44534330,
    CU_EXTERNAL = 0x45585430,
};

/* One CUDA device ordinal: a card, or one MIG compute instance of a card. */
struct cu_device {
    uint32_t card;           /* the card of the ordinal at cuInit */
    _Atomic uint32_t device; /* the card on which the ordinal's work runs now: a restore may have changed it */
    int gi, ci;
    struct sim_use *use; /* the use in the shared state; NULL until this process has a context on the device */
    CUcontext primary;
    uint32_t primary_refs, primary_flags;
    CUmemoryPool default_pool, current_pool, graph_pool;
    _Atomic double launched[CU_LAUNCH_DEPTH];
    _Atomic uint64_t launch_count;
    uint64_t mps_limit;               /* bytes that this process may hold; 0: no limit */
    uint32_t rm_device, rm_subdevice; /* resource manager handles; 0: not made yet */
};

struct CUctx_st {
    uint32_t magic;
    int ordinal;
    CUcontext base;   /* the context itself; for a green context's context, the primary context */
    CUgreenCtx green; /* the green context, or NULL */
    unsigned int flags;
    bool primary;
    uint32_t attached; /* references beyond the first: cuCtxAttach */
    unsigned long long id;
    _Atomic double position; /* end of the last work in any stream of the context */
    CUevent pending[CU_PENDING_EVENTS];
    uint32_t pending_count;
    size_t limits[CU_LIMIT_MAX];
    uint32_t groups[CU_CHANNEL_GROUPS]; /* handles of the context's channel groups */
    struct slab *room[CU_SLAB_CLASSES]; /* lists of slabs with free slots, by size class */
};

/*
 * The context in which an object was made, and with which the object ends. The serial number distinguishes a later
 * context at the same address.
 */
struct cu_owner {
    CUcontext ctx;
    unsigned long long id;
};

struct CUstream_st {
    uint32_t magic;
    CUcontext ctx;
    struct cu_owner owner;
    CUgreenCtx green; /* the green context in which the object was made, or NULL */
    unsigned int flags;
    int priority;
    unsigned long long id;
    _Atomic double position;
    struct cu_capture *capture;
    CUgraphNode *frontier; /* the nodes after which the next captured node comes */
    size_t frontier_count;
};

struct CUevent_st {
    uint32_t magic;
    CUcontext ctx;
    struct cu_owner owner;
    unsigned int flags;
    bool recorded, resolved;
    double position;
    uint64_t recorded_ns, at_ns;
    struct sim_shared_event *shared; /* set if other processes opened or may open the event; otherwise NULL */
    unsigned long long shared_id;
    unsigned long long capture_id; /* id of the capture that recorded the event; 0: none */
    CUgraphNode *captured;
    size_t captured_count;
};

struct cu_block {
    CUdeviceptr base;
    size_t size; /* the requested size; 0: a free slot of a slab */
    enum sim_kind kind;
    int ordinal;
    CUcontext ctx;
    CUmemoryPool pool;
    unsigned long long id;
    struct cu_graph_memory *memory; /* the graph memory that owns these addresses, if any */
    bool imported;                  /* the memory belongs to another process, and only that process is charged */
    bool external;                  /* imported memory that is freed like the process's own memory */
};

struct cu_process {
    struct sim_state *s;
    struct sim_proc *proc;
    _Atomic int started; /* 0: the process has not called cuInit; 1: ready; 2: child of a process that had called it */
    /* the node's boot number at the start of this process; after a reboot the process is no longer valid */
    uint64_t boot;
    _Atomic uint32_t gate_seen; /* the value of proc->gate at the last time that this process passed the gate */
    pthread_mutex_t lock;       /* guards everything below, and the registries of each family */
    int device_count;
    struct cu_device devices[CU_MAX_ORDINALS];
    unsigned long long next_id;
    double kernel_us;    /* duration of a kernel in microseconds; 0: the profile's value */
    int shared_memories; /* number of memories shared with other processes, which prevent a suspension */
    int ipc_memories;    /* number of memories shared by cuIpc*: branches before 610 cannot suspend them */
    int rm_file;         /* descriptor of the control device; -1: not open yet */
    uint32_t rm_client, rm_handles;
    bool mps;
    _Atomic int mps_fault; /* 0, or the CUresult that every call returns from now on */
    double mps_fraction;
};

extern struct cu_process cu;

/*
 * Lists functions that are called when an object ends, for files that keep data of it. They are collected in a linker
 * section, so that a lower file need not know a higher one. Called under cu_lock, in no order, while the object is
 * valid.
 */
#define CU_AT_END(type, list, function) \
    __attribute__((used, section(#list))) static void (*const function##_listed)(type) = function
#define CU_ENDS(type, list)                                                            \
    extern void (*const __start_##list[])(type) __attribute__((visibility("hidden"))); \
    extern void (*const __stop_##list[])(type) __attribute__((visibility("hidden")))
#define CU_EACH_END(list, object)                                      \
    do {                                                               \
        for (size_t i_ = 0; &__start_##list[i_] < __stop_##list; i_++) \
            __start_##list[i_](object);                                \
    } while (0)
typedef CUcontext cu_context_end;
typedef const struct cu_block *cu_block_end;

/* Functions of enter.c. */
/* checks that the driver is initialised and that no fault is set */
CUresult cu_enter(const char *function);
CUresult cu_enter_device(const char *function, CUdevice dev);    /* checks as cu_enter, and that dev is an ordinal */
CUresult cu_enter_context(const char *function, CUcontext *ctx); /* checks as cu_enter, and that a context is current */
/*
 * Checks as cu_enter, for calls that succeed in a checkpointed process: those that do on an H200 with driver
 * 580.159.04.
 */
CUresult cu_enter_suspended(const char *function);
/* checks as cu_enter, for calls that do not wait while the process is locked */
CUresult cu_enter_locked_out(const char *function);

/* Functions of process.c. */
bool cu_checkpointed(void); /* returns true if this process is checkpointed now */
/* waits while this process is locked; reads to which device a restore has moved the process */
CUresult cu_gate(void);
void cu_sim_lock(void); /* takes sim_lock at a time at which this process is not locked */
void cu_lock(void);
void cu_unlock(void);
struct sim_device *cu_sim_device(int ordinal);
uint32_t cu_sm_count(int ordinal); /* SMs of the card or the instance, before the MPS limit */
/* changes the number of memories shared with other processes, which prevent a suspension */
void cu_cannot_suspend(int change);
void cu_shares_by_ipc(int change); /* the same for memory shared by cuIpc* */

/* Functions of device.c. */
void cu_parse_uuid(const char *text, CUuuid *uuid); /* reads "GPU-..." or "MIG-..." */
int cu_multiprocessors(int ordinal);                /* SMs of the card or the instance, with the MPS limit */

/*
 * Function of visible.c: fills cu.devices by CUDA_VISIBLE_DEVICES, from the devices that an MPS daemon offers (NULL:
 * all devices).
 */
CUresult cu_find_devices(const char *offered);

#define CU_TRY(expression)                     \
    do {                                       \
        CUresult cu_try_result = (expression); \
        if (cu_try_result != CUDA_SUCCESS)     \
            return cu_try_result;              \
    } while (0)
#define CU_CHECK(condition, result) \
    do {                            \
        if (!(condition))           \
            return (result);        \
    } while (0)

/* Functions of current.c. */
bool cu_is_context(CUcontext ctx);
struct cu_owner cu_owner_of(CUcontext ctx);
bool cu_owned(const struct cu_owner *owner); /* returns true if the object's context still lives */
/* this thread's context for new objects: for a green context, the primary one */
CUcontext cu_current(void);
CUcontext cu_view(void);                  /* the context as it was made current */
CUresult cu_find_context(CUcontext *ctx); /* finds the current context, if it lives */
CUresult cu_push(CUcontext ctx);
CUresult cu_pop(CUcontext *ctx); /* ctx may be NULL */
struct cu_device *cu_device_of(CUcontext ctx);

/* Functions of context.c. */
CUcontext cu_view_make(CUcontext primary, CUgreenCtx green); /* the caller holds cu_lock; NULL: no memory */
CUresult cu_primary_retain(CUdevice dev, CUcontext *ctx);    /* the caller holds cu_lock */
void cu_primary_release(CUdevice dev);                       /* the caller holds cu_lock */

/* Functions of channels.c. The caller holds cu_lock. */
CUresult cu_channels_make(CUcontext ctx);
void cu_channels_end(CUcontext ctx);

/* Functions of charge.c: device memory, counted in the shared state. A charge succeeds as a whole or not at all. */
CUresult cu_charge(int ordinal, enum sim_kind kind, uint64_t bytes);
void cu_uncharge(int ordinal, enum sim_kind kind, uint64_t bytes);
uint64_t cu_round_page(uint64_t bytes);

/* Functions of arena.c: device addresses. The caller holds cu_lock. */
CUresult cu_alloc(CUcontext ctx, enum sim_kind kind, CUmemoryPool pool, size_t size, CUdeviceptr *out);
CUresult cu_free(CUdeviceptr p);
struct cu_block *cu_block_at(CUdeviceptr p); /* the block that contains p, or NULL */
bool cu_in_arena(CUdeviceptr p);
CUdeviceptr cu_arena_take(uint64_t bytes); /* takes whole pages, aligned to 2 MiB; 0: no addresses left */
void cu_arena_give(CUdeviceptr p, uint64_t bytes);
void cu_arena_restore(CUdeviceptr p, uint64_t bytes); /* maps the arena's own memory at p again */
int cu_arena_file(CUdeviceptr p, uint64_t *offset);   /* the file behind p; -1: none */
CUresult cu_block_import(CUcontext ctx, CUmemoryPool pool, int fd, uint64_t offset, size_t size, CUdeviceptr *out);
void cu_block_close(struct cu_block *b); /* ends an imported block */
/* Makes a block at addresses that a graph's allocation node owns. */
CUresult cu_block_place(CUcontext ctx, CUmemoryPool pool, struct cu_graph_memory *memory, CUdeviceptr base,
                        size_t size);
void cu_free_of_pool(CUmemoryPool pool);

/* Functions of shared_event.c: events that other processes know. */
bool cu_shared_make(CUevent e); /* returns false if the node has no free entry for the event */
bool cu_shared_alive(const struct sim_shared_event *e);
void cu_shared_record(CUevent e);
bool cu_shared_elsewhere(CUevent e); /* returns true if another process recorded the event last */
bool cu_shared_reached(CUevent e);
void cu_shared_wait(CUevent e);
void cu_shared_leave(CUevent e);

/* Functions of vmm.c. */
bool cu_vmm_covers(CUdeviceptr p, size_t size);
int cu_vmm_ordinal(CUdeviceptr p); /* ordinal of the memory mapped at p; -1: none */
/* The file of the memory mapped at p; -1: none. Lowers *bytes to those that follow p in it. */
int cu_vmm_file(CUdeviceptr p, uint64_t *offset, size_t *bytes);
bool cu_vmm_exported(int fd, uint64_t *size); /* returns true if fd is the descriptor of an exported allocation */

/* Functions of host.c. */
struct cu_host {
    void *base;
    size_t size;
    unsigned int flags;
    bool registered;
    CUcontext ctx;
};
struct cu_host *cu_host_at(const void *p);

/* Functions of copy.c. The first checks whether bytes are device memory, or host memory that a device may use. */
CUresult cu_check_device_range(CUdeviceptr p, size_t size);
CUresult cu_copy(void *to, const void *from, size_t size);
CUresult cu_copy_3d(const CUDA_MEMCPY3D *copy);
CUresult cu_fill_rows(CUdeviceptr to, size_t pitch, const void *value, size_t width, size_t count,
                      size_t rows); /* width: bytes of the value; count: values in a row */

/* Functions of sparse.c. The addresses may be those of a host or of a device; the caller has checked them. */
void cu_sparse_copy(char *to, const char *from, size_t size);
void cu_sparse_fill(char *to, size_t size, const char *pattern, size_t length); /* repeats the pattern */
size_t cu_sparse_zeros(const void *p, size_t size); /* number of bytes at p that were never written */

/* Functions of stream.c. */
CUresult cu_stream_resolve(CUstream stream, CUcontext *ctx, double *position);
void cu_stream_advance(CUstream stream, CUcontext ctx, double position);
CUresult cu_wait(CUcontext ctx, double position);
bool cu_reached(CUcontext ctx, double position);
void cu_pending_add(CUcontext ctx, CUevent event);
CUresult cu_event_record(CUevent event, CUstream stream);
CUresult cu_event_wait(CUevent event, CUstream stream);
CUresult cu_stream_make(CUcontext view, unsigned int flags, int priority, CUstream *out);
/* returns ctx; for a stream of a green context, that green context's own CUcontext */
CUcontext cu_stream_view(CUstream stream, CUcontext ctx);
CUresult cu_context_record(CUcontext view, CUevent event);
CUresult cu_context_wait(CUcontext view, CUevent event);
CUresult cu_check_event(CUevent event); /* succeeds if the event is live and its context too */
void cu_pending_resolve(CUcontext ctx);

/* Functions of capture.c. */
extern _Atomic uint32_t cu_captures;
struct cu_capture *cu_capture_find(CUstream stream); /* the capture that the stream is part of, or NULL */
CUresult cu_capture_refuse(CUstream stream);         /* refuses a call that no capture can record */
CUresult cu_capture_implicit(CUcontext ctx);         /* called when a thread uses the legacy stream */
CUresult cu_capture_whole(CUcontext ctx);            /* called when a thread waits for the whole context */
void cu_capture_green(CUgreenCtx green);             /* invalidates the captures of a green context's streams */
CUresult cu_capture_unsafe(void);                    /* called in a function that may wait for the device */
CUresult cu_capture_record(CUevent event, CUstream stream);
CUresult cu_capture_wait(CUstream stream, CUevent event);
CUresult cu_capture_event(CUevent event); /* called in a function that needs the event's result */
bool cu_capture_has(CUevent event);
void cu_capture_leave_event(CUevent event);
void cu_capture_leave_stream(CUstream stream);

/* Functions of launch.c. */
CUresult cu_launch_check(CUfunction f, const unsigned int grid[3], const unsigned int block[3],
                         unsigned int shared_bytes);
CUresult cu_launch(CUfunction f, const unsigned int grid[3], const unsigned int block[3], unsigned int shared_bytes,
                   CUstream stream);

/* called after the launch of a kernel that may wait */
CUresult cu_hold(CUfunction f, void **parameters, CUstream stream);

/* Functions of hold.c. */
CUresult cu_hold_add(CUcontext ctx, void **parameters, double *end); /* the caller holds cu_lock */
void cu_holds_look(void);                                            /* ends kernels whose wait is over */
/* waits until `position` is reached; returns false if no kernel waits any more */
bool cu_holds_wait(CUcontext ctx, double position);

/* Modules: module.c. */
struct CUmod_st {
    uint32_t magic;
    CUcontext ctx;
    struct cu_owner owner;
    char *text; /* PTX; NULL: the module is a binary image, in which every name is assumed to exist */
    struct CUfunc_st *functions;
    struct cu_global *globals;
    double kernel_us;
    bool digests;
    bool waits; /* properties of the module's kernels: see hold.c */
    bool lazy;  /* the module is part of a library and is loaded at its first use */
};
struct CUfunc_st {
    uint32_t magic;
    CUmodule module;
    char *name;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
    CUfunction next;
};
CUresult cu_module_load(CUcontext ctx, const void *image, CUmodule *out);
bool cu_is_function(CUfunction f);

/* Arrays: array.c. */
struct CUarray_st {
    uint32_t magic;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    CUdeviceptr data;
    size_t pitch;
    bool part; /* the array is a level of a mipmap, which owns the memory */
    struct cu_owner owner;
};
bool cu_is_mipmap(CUmipmappedArray mipmap);
size_t cu_element_bytes(CUarray_format format, unsigned int channels);

/* Memory pools: pool.c. */
struct cu_pool_origin { /* Identifies a pool on the node. */
    uint64_t start_ticks, id;
    uint32_t pid;
};

struct CUmemPoolHandle_st {
    uint32_t magic;
    int ordinal;
    bool is_default;
    unsigned int handle_types; /* handle types by which the pool can be exported */
    bool imported, shared;     /* shared: the pool was exported or imported, which prevents a suspension */
    int memory;                /* the file of an imported pool's memory */
    struct cu_pool_origin origin;
    uint64_t threshold, used, used_high, reserved, reserved_high;
    int reuse[4];
    CUmemoryPool next;
};
CUmemoryPool cu_pool_new(int ordinal, bool is_default);
CUresult cu_pool_of_device(int ordinal, CUmemoryPool *pool);
CUmemoryPool cu_pool_of_graphs(int ordinal); /* returns NULL if there is no memory for the pool */

/* Functions of pool_ledger.c. The caller holds cu_lock. */
CUresult cu_pool_charge(CUmemoryPool pool, uint64_t bytes);
void cu_pool_uncharge(CUmemoryPool pool, uint64_t bytes);
void cu_pool_trim(CUmemoryPool pool, uint64_t keep);

/* Functions of mps.c. */
CUresult cu_mps_connect(void);
void cu_mps_check(void); /* detects that the daemon has died */

#endif

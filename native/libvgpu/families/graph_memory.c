#include "graph_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "device.h"
#include "driver_overhead.h"
#include "functions.h"
#include "in_child.h"
#include "pause.h"
#include "pool.h"
#include "source.h"
#include "suspended.h"
#include "tenant.h"

#define DEPTH_MAX 64 /* maximum nesting of child graphs */
/*
 * How long a launch that exceeds the limit waits for earlier graphs of its stream. The wait must end, because the work
 * of these graphs may itself wait for a later call of this thread.
 */
#define UNFINISHED_MAX_NS 10000000000u
#define UNFINISHED_LOOK_NS 100000

/* The memory that an executable graph can add on each device of the lease. */
struct vgpu_graph_need {
    uint64_t bytes[VGPU_MAX_DEVICES];
    /* hash of the addresses that the graph only allocates or only frees; 0: there are none */
    uint64_t unfreed;
    uint64_t bound;  /* value of `bindings` at the graph's last launch; 0: the graph has no memory */
    uint64_t stream; /* stream of the graph's last launch */
};

static uint32_t any_memory; /* 1: a graph of this process may allocate */

/* What is known about all graphs of this process; guarded by `lock`. */
static struct {
    uint64_t bindings;  /* increases whenever another graph may take the memory of a graph */
    uint64_t stream;    /* stream of the last launch */
    uint32_t launching; /* number of launches in progress */
    uint32_t trimming;
    struct {
        CUdevice ordinal; /* CUDA's ordinal of the device plus 1; 0: no graph has allocated there */
        uint64_t charged;
        uint64_t needs; /* bytes that all executable graphs need, including those destroyed since the last trim */
        uint64_t gone;
        /*
         * bytes of the graphs of relying launches: launches in progress that have claimed nothing, because their graphs
         * still had their memory
         */
        uint64_t relying;
        uint64_t kept; /* claims of launches that have ended, kept because a relying launch may use their memory */
    } of[VGPU_MAX_DEVICES];
} graphs = {.bindings = 1};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void vgpu_graph_memory_made(void)
{
    __atomic_store_n(&any_memory, 1, __ATOMIC_RELAXED);
}

static bool none_made(void)
{
    return __atomic_load_n(&any_memory, __ATOMIC_RELAXED) == 0;
}

bool vgpu_graph_captures_now(CUstream stream, int per_thread)
{
    if (!vgpu_capture_on(stream, per_thread))
        return false;
    vgpu_graph_memory_made();
    return true;
}

/* --- below: the caller holds the lock */

/*
 * Returns the bytes that the driver holds for graphs on a device now; if it does not report them, the last known value.
 */
static uint64_t held_on(int device)
{
    cuuint64_t held = 0;
    CUdevice ordinal = graphs.of[device].ordinal - 1;
    return CALL(cuDeviceGetGraphMemAttribute, ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &held) == CUDA_SUCCESS
               ? held
               : graphs.of[device].charged;
}

/*
 * Returns the maximum by which a launch that needs `bytes` can increase the memory that the driver holds for graphs:
 * never more than would be missing if all graphs had separate memory; while a trim is in progress, `bytes`.
 */
static uint64_t most_added(int device, uint64_t bytes)
{
    uint64_t held = held_on(device);
    uint64_t needs = graphs.of[device].needs;
    uint64_t missing = needs > held ? needs - held : 0;
    return graphs.trimming > 0 || bytes < missing ? bytes : missing;
}

/*
 * Returns the bytes that a launch must claim before it starts, if its graph needs `bytes`. The launch may take memory on
 * which launches in progress rely. The driver then allocates memory for these again, so their bytes are claimed, too.
 * `known`: `needs` includes the graph.
 */
static uint64_t addable(int device, uint64_t bytes, bool known)
{
    uint64_t relying = graphs.of[device].relying;
    return known ? most_added(device, bytes + relying) : bytes + most_added(device, relying);
}

static void rely(const struct vgpu_graph_need *need, bool begins)
{
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        graphs.of[d].relying += begins ? need->bytes[d] : -need->bytes[d];
}

/* Records a launch. Returns true if the graph still has its memory. */
static bool bind(struct vgpu_graph_need *need, uint64_t stream)
{
    bool has_it = need->bound == graphs.bindings && need->stream == stream && graphs.trimming == 0;
    if (graphs.stream != stream || need->unfreed != 0)
        graphs.bindings++;
    graphs.stream = stream;
    need->bound = graphs.bindings;
    need->stream = stream;
    return has_it;
}

/* --- below: the caller does not hold the lock */

static bool settle(int device)
{
    pthread_mutex_lock(&lock);
    if (graphs.of[device].ordinal == 0) {
        pthread_mutex_unlock(&lock);
        return true;
    }
    uint64_t before = graphs.of[device].charged;
    uint64_t held = held_on(device);
    if (held < before && graphs.of[device].relying > 0)
        held = before; /* a relying launch (see `relying`) may need the memory that was trimmed */
    if (held > before)
        vgpu_account_add(vgpu_tenant_account(), (unsigned)device, held - before);
    else if (held < before)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)device, before - held);
    graphs.of[device].charged = held;
    pthread_mutex_unlock(&lock);
    if (held != before)
        vgpu_overhead_changed();
    return held == before;
}

static void trim_ended(void)
{
    pthread_mutex_lock(&lock);
    graphs.trimming--;
    graphs.bindings++;
    for (int d = 0; d < (int)VGPU_MAX_DEVICES; d++) {
        uint64_t held = graphs.of[d].gone > 0 ? held_on(d) : 0;
        uint64_t kept = graphs.of[d].gone < held ? graphs.of[d].gone : held;
        graphs.of[d].needs -= graphs.of[d].gone - kept;
        graphs.of[d].gone = kept;
    }
    pthread_mutex_unlock(&lock);
}

/*
 * Makes the driver free the memory that no graph uses now, unless a launch is in progress. Returns true if memory was
 * freed.
 */
static bool give_back(int device)
{
    if (none_made())
        return false;
    pthread_mutex_lock(&lock);
    CUdevice ordinal = graphs.of[device].ordinal - 1;
    bool may = ordinal >= 0 && graphs.of[device].charged > 0 && graphs.launching == 0;
    graphs.trimming += may;
    pthread_mutex_unlock(&lock);
    if (!may)
        return false;
    int mode = vgpu_capture_relax_if_any();
    CALL(cuDeviceGraphMemTrim, ordinal);
    vgpu_capture_restore_if_any(mode);
    trim_ended();
    return !settle(device);
}

static uint64_t charged(void)
{
    uint64_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        bytes += graphs.of[d].charged;
    pthread_mutex_unlock(&lock);
    return bytes;
}

static const struct vgpu_source graph_source = {settle, give_back, charged, VGPU_STAY_GRAPHS};
VGPU_SOURCE(graph_source);

CUresult vgpu_graph_trim(CUdevice device)
{
    bool limited;
    pthread_mutex_lock(&lock);
    graphs.trimming++;
    pthread_mutex_unlock(&lock);
    CUresult result = CALL(cuDeviceGraphMemTrim, device);
    trim_ended();
    if (vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited && vgpu_device_index(device) != VGPU_NOT_IN_LEASE)
        settle(vgpu_device_index(device));
    return result;
}

/* --- the needs of a graph */

static uint64_t mixed(CUdeviceptr address)
{
    uint64_t word = (uint64_t)address * 0x9e3779b97f4a7c15u;
    return (word ^ word >> 32) * 0x9e3779b97f4a7c15u;
}

/* Adds what one allocation node can allocate, and on which device. */
static void add_node(CUgraphNode node, struct vgpu_graph_need *need)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    if (CALL(cuGraphMemAllocNodeGetParams, node, &parameters) != CUDA_SUCCESS)
        return;
    need->unfreed += mixed(parameters.dptr);
    if (parameters.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return;
    int device = vgpu_device_index(parameters.poolProps.location.id);
    if (device == VGPU_NOT_IN_LEASE)
        return;
    need->bytes[device] += vgpu_round(parameters.bytesize, VGPU_PAGE_BYTES);
    pthread_mutex_lock(&lock);
    graphs.of[device].ordinal = parameters.poolProps.location.id + 1;
    pthread_mutex_unlock(&lock);
}

static void free_node(CUgraphNode node, struct vgpu_graph_need *need)
{
    CUdeviceptr address;
    if (CALL(cuGraphMemFreeNodeGetParams, node, &address) == CUDA_SUCCESS)
        need->unfreed -= mixed(address);
}

static void add_graph(CUgraph graph, struct vgpu_graph_need *need, int depth)
{
    size_t count = 0;
    if (depth > DEPTH_MAX || CALL(cuGraphGetNodes, graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    CUgraphNode *nodes = calloc(count, sizeof(*nodes));
    if (nodes == NULL || CALL(cuGraphGetNodes, graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (CALL(cuGraphNodeGetType, nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            add_node(nodes[i], need);
        else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE)
            free_node(nodes[i], need);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                 CALL(cuGraphChildGraphNodeGetGraph, nodes[i], &child) == CUDA_SUCCESS)
            add_graph(child, need, depth + 1);
    }
    free(nodes);
}

/*
 * Returns the memory that a graph can take. The driver takes memory for all nodes of the graph (measured on an H200: 64
 * nodes of 1 MiB take 64 MiB).
 */
static struct vgpu_graph_need need_of(CUgraph graph)
{
    struct vgpu_graph_need need = {0};
    add_graph(graph, &need, 0);
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        need.bytes[d] = vgpu_round(need.bytes[d], VGPU_POOL_GRAIN);
    return need;
}

/* Returns the devices on which the graph allocates, as bits. */
static uint32_t devices_of(const struct vgpu_graph_need *need)
{
    uint32_t devices = 0;
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        devices |= need->bytes[d] > 0 ? 1u << d : 0;
    return devices;
}

void vgpu_graph_forget(CUgraphExec exec)
{
    struct vgpu_entry entry;
    if (none_made() || !vgpu_table_take(VGPU_KIND_GRAPH, (uint64_t)(uintptr_t)exec, &entry))
        return;
    const struct vgpu_graph_need *need = entry.owner;
    pthread_mutex_lock(&lock);
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        graphs.of[d].gone += need->bytes[d];
    pthread_mutex_unlock(&lock);
    free(entry.owner);
}

CUresult vgpu_graph_instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph)
{
    bool limited;
    if (result != CUDA_SUCCESS || none_made() || vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return result;
    vgpu_graph_forget(*exec); /* forgets an executable graph that ended with its context and had the same handle */
    struct vgpu_graph_need *need = malloc(sizeof(*need));
    if (need == NULL)
        return result; /* launches claim no memory for this graph; the next measurement counts it (driver_overhead.h) */
    *need = need_of(graph);
    struct vgpu_entry entry = {.kind = VGPU_KIND_GRAPH, .key = (uint64_t)(uintptr_t)*exec, .owner = need};
    if (devices_of(need) == 0 || !vgpu_table_put(&entry)) {
        free(need);
        return result;
    }
    pthread_mutex_lock(&lock);
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        graphs.of[d].needs += need->bytes[d];
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- claims of launches */

/*
 * Returns the bytes of the claims to remove: claims of launches that ended while other launches relied on their memory;
 * 0 if a launch still relies on it.
 */
static uint64_t take_kept(int device)
{
    pthread_mutex_lock(&lock);
    uint64_t kept = graphs.of[device].relying == 0 ? graphs.of[device].kept : 0;
    graphs.of[device].kept -= kept;
    pthread_mutex_unlock(&lock);
    return kept;
}

/* Keeps the claim of an ended launch (see `kept`) if there are relying launches. Otherwise returns false. */
static bool keep(const struct vgpu_charge *claim)
{
    pthread_mutex_lock(&lock);
    bool kept = graphs.of[claim->device].relying > 0;
    graphs.of[claim->device].kept += kept ? claim->bytes : 0;
    pthread_mutex_unlock(&lock);
    return kept;
}

/* Charges the bytes that the driver holds now, and removes the claims. */
static void undo(struct vgpu_graph_charge *charge, CUresult result)
{
    for (int d = 0; d < (int)VGPU_MAX_DEVICES; d++) {
        if ((charge->devices >> d & 1) == 0)
            continue;
        settle(d);
        uint64_t kept = take_kept(d);
        if (kept > 0)
            vgpu_account_settle(vgpu_tenant_account(), (unsigned)d, kept, 0);
    }
    for (unsigned i = 0; i < charge->count; i++)
        if (result != CUDA_SUCCESS || !keep(&charge->of[i]))
            vgpu_charge_undo(&charge->of[i], result);
    charge->count = 0;
}

static void unbind(struct vgpu_graph_need *need)
{
    pthread_mutex_lock(&lock);
    need->bound = 0;
    pthread_mutex_unlock(&lock);
}

static void set_launching(bool launching)
{
    pthread_mutex_lock(&lock);
    graphs.launching += launching ? 1 : -1;
    pthread_mutex_unlock(&lock);
}

/* Claims the bytes that the launch can add on each device. On success the launch counts as in progress. */
static CUresult claim_once(struct vgpu_graph_charge *charge, const struct vgpu_graph_need *need)
{
    CUresult result = CUDA_SUCCESS;
    set_launching(true);
    for (int d = 0; d < (int)VGPU_MAX_DEVICES && result == CUDA_SUCCESS; d++) {
        pthread_mutex_lock(&lock);
        uint64_t bytes = need->bytes[d] > 0 ? addable(d, need->bytes[d], charge->need != NULL) : 0;
        pthread_mutex_unlock(&lock);
        if (bytes > 0 && (result = vgpu_charge_index(&charge->of[charge->count], d, bytes)) == CUDA_SUCCESS)
            charge->count++;
    }
    if (result != CUDA_SUCCESS) {
        undo(charge, result);
        set_launching(false);
    }
    return result;
}

/*
 * Returns whether no earlier graph can still need its memory: no launch is in progress, and the work of the launch's
 * stream has finished. Only graphs of one stream share memory while they wait for each other.
 */
static bool is_finished(const struct vgpu_graph_charge *charge)
{
    vgpu_suspended_check();
    int mode = vgpu_capture_relax_if_any();
    CUresult result = charge->per_thread ? CALL(cuStreamQuery_ptsz, charge->stream)
                                         : CALL(cuStreamQuery, charge->stream);
    vgpu_capture_restore_if_any(mode);
    pthread_mutex_lock(&lock);
    bool none = graphs.launching == 0;
    pthread_mutex_unlock(&lock);
    return result != CUDA_ERROR_NOT_READY && none;
}

/*
 * Claims what a launch can add. If that exceeds the limit, frees the memory that no graph uses, and waits, at most
 * UNFINISHED_MAX_NS, for earlier graphs of the stream: the driver would give their memory to this launch. An
 * instantiation that uploads does not wait.
 */
static CUresult claim(struct vgpu_graph_charge *charge, const struct vgpu_graph_need *need)
{
    CUresult result = claim_once(charge, need);
    uint64_t until = now_ns() + UNFINISHED_MAX_NS;
    bool finished = false;
    while (result == CUDA_ERROR_OUT_OF_MEMORY && !finished) {
        bool came = false;
        finished = charge->need == NULL || is_finished(charge) || now_ns() > until;
        for (int d = 0; d < (int)VGPU_MAX_DEVICES; d++)
            came = ((charge->devices >> d & 1) != 0 && give_back(d)) || came;
        if (came)
            result = claim_once(charge, need);
        else if (!finished)
            vgpu_pause_ns(UNFINISHED_LOOK_NS);
    }
    return result;
}

/* Returns a word that identifies the stream. A thread's own stream gets a new word each time. */
static uint64_t word_of(CUstream stream, int per_thread)
{
    static uint64_t own;
    if (stream == CU_STREAM_PER_THREAD || (stream == NULL && per_thread))
        return __atomic_add_fetch(&own, 2, __ATOMIC_RELAXED) | 1;
    if (stream != NULL && stream != CU_STREAM_LEGACY)
        return (uint64_t)(uintptr_t)stream;
    return (uint64_t)(uintptr_t)vgpu_charge_context() + 2;
}

CUresult vgpu_graph_begin(struct vgpu_graph_charge *charge, CUgraphExec exec, CUstream stream, int per_thread)
{
    struct vgpu_entry entry;
    charge->devices = 0;
    if (none_made() || !vgpu_table_get(VGPU_KIND_GRAPH, (uint64_t)(uintptr_t)exec, &entry))
        return CUDA_SUCCESS;
    vgpu_suspended_check(); /* a suspended process's launch must wait here, before any call of the driver */
    struct vgpu_graph_need *need = entry.owner;
    uint64_t word = word_of(stream, per_thread);
    *charge = (struct vgpu_graph_charge){
        .need = need, .devices = devices_of(need), .stream = stream, .per_thread = per_thread};
    pthread_mutex_lock(&lock);
    charge->relies = bind(need, word);
    if (charge->relies) {
        graphs.launching++;
        rely(need, true);
    }
    pthread_mutex_unlock(&lock);
    CUresult result = charge->relies ? CUDA_SUCCESS : claim(charge, need);
    if (result != CUDA_SUCCESS)
        unbind(need);
    return result;
}

CUresult vgpu_graph_end(struct vgpu_graph_charge *charge, CUresult result)
{
    if (charge->devices == 0)
        return result;
    if (charge->relies) {
        pthread_mutex_lock(&lock);
        rely(charge->need, false);
        pthread_mutex_unlock(&lock);
    }
    undo(charge, result);
    set_launching(false);
    if (charge->need != NULL && result != CUDA_SUCCESS)
        unbind(charge->need);
    return result;
}

CUresult vgpu_graph_begin_upload(struct vgpu_graph_charge *charge, CUgraph graph,
                                 const CUDA_GRAPH_INSTANTIATE_PARAMS *how)
{
    bool limited;
    charge->devices = 0;
    if (how == NULL || (how->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) == 0 || none_made() ||
        vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return CUDA_SUCCESS;
    struct vgpu_graph_need need = need_of(graph);
    *charge = (struct vgpu_graph_charge){.devices = devices_of(&need)};
    return charge->devices != 0 ? claim(charge, &need) : CUDA_SUCCESS;
}

static void reset(void)
{
    pthread_mutex_init(&lock, NULL);
    memset(&graphs, 0, sizeof(graphs));
    graphs.bindings = 1;
    any_memory = 0;
}
VGPU_IN_CHILD(reset);

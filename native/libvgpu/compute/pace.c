#include "pace.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "clock.h"
#include "device.h"
#include "drain.h"
#include "functions.h"
#include "in_child.h"
#include "launches.h"
#include "tenant.h"

#define RING 32u     /* markers of one context in flight */
#define DEPTH_MIN 2u /* launches in flight, however long they are */
#define BATCH_MAX 2048u
#define FREE_BATCH 4096u /* launches between two looks while nobody limits them */
#define STRAY_BATCH 61u  /* and while one may be the first on a device that is somebody else's now */
#define LONG_BATCH 1u    /* batches up to this get a marker behind, too: long launches are measured each */
#define WAIT_MIN_NS 2000u
#define ARRIVE_MAX_NS 500000u

struct flow {
    struct flow *next;
    CUcontext context;
    int device; /* index in the lease, or VGPU_NOT_IN_LEASE */
    CUevent ring[RING];
    uint64_t counts[RING]; /* launches before the marker */
    uint32_t made;         /* events that exist */
    uint32_t head;         /* next to record */
    uint32_t tail;         /* oldest that has not run; tail == head: none */
    uint32_t barrier;      /* first marker since the device was last idle: times before it say nothing */
    uint64_t run;          /* launches known to have run */
    uint64_t run_seen_ns;  /* when that was seen */
    double unit_ns;        /* device time of one launch of weight 1; 0: not known yet */
    CUevent drain;
    bool used;     /* launched to since the last drain */
    bool launched; /* to it, ever */
    enum vgpu_drain_state draining;
    struct vgpu_drain_job job;
};

static struct flow *flows; /* one for each context that was launched to and has not ended */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread bool mark_after;
static uint32_t launched_to; /* devices, as bits */
static uint32_t declared;    /* of them, those that the arbiter was told of; all, if none could be told */

static void reset(void)
{
    flows = NULL; /* the parent's stay as garbage: a thread that is not here may have held the heap's lock */
    launched_to = 0;
    declared = 0;
    pthread_mutex_init(&lock, NULL);
}
VGPU_IN_CHILD(reset);

/* Launches that have reached the driver, by weight. */
static uint64_t launched(void)
{
    uint64_t asked = __atomic_load_n(&vgpu_launches.asked, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&vgpu_launches.count, __ATOMIC_SEQ_CST) - asked;
}

static bool is_default(CUstream stream)
{
    return stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

static CUcontext context_of(CUstream stream, int per_thread)
{
    CUcontext context = NULL;
    if (!is_default(stream)) {
        CUresult result = per_thread ? CALL(cuStreamGetCtx_ptsz, stream, &context)
                                     : CALL(cuStreamGetCtx, stream, &context);
        if (result == CUDA_SUCCESS)
            return context;
    }
    return CALL(cuCtxGetCurrent, &context) == CUDA_SUCCESS ? context : NULL;
}

static struct flow *flow_find(CUcontext context)
{
    for (struct flow *flow = flows; flow != NULL; flow = flow->next)
        if (flow->context == context)
            return flow;
    return NULL;
}

static void note_devices(void)
{
    uint32_t devices = 0;
    for (const struct flow *flow = flows; flow != NULL; flow = flow->next)
        if (flow->device != VGPU_NOT_IN_LEASE && flow->launched)
            devices |= 1u << flow->device;
    __atomic_store_n(&launched_to, devices, __ATOMIC_RELAXED);
}

static struct flow *flow_get(CUcontext context)
{
    CUdevice device;
    struct flow *flow = context != NULL ? flow_find(context) : NULL;
    if (flow != NULL || context == NULL || (flow = calloc(1, sizeof(*flow))) == NULL)
        return flow;
    flow->next = flows;
    flows = flow;
    flow->context = context;
    flow->device = vgpu_device_of_context(context, &device) == CUDA_SUCCESS ? vgpu_device_index(device)
                                                                            : VGPU_NOT_IN_LEASE;
    flow->run = launched();
    flow->run_seen_ns = now_ns();
    return flow;
}

/* Something is launched to the context. */
static struct flow *flow_launched(CUcontext context)
{
    struct flow *flow = flow_get(context);
    if (flow != NULL && !flow->launched) {
        flow->launched = true;
        note_devices();
    }
    return flow;
}

static void learn(struct flow *flow, uint32_t from, uint32_t to)
{
    float ms;
    uint64_t launches = flow->counts[to] - flow->counts[from];
    if (launches == 0 || launches > flow->counts[to] ||
        CALL(cuEventElapsedTime, &ms, flow->ring[from], flow->ring[to]) != CUDA_SUCCESS || ms < 0)
        return;
    double unit = (double)ms * 1e6 / (double)launches;
    flow->unit_ns = flow->unit_ns == 0 ? unit : flow->unit_ns + (unit - flow->unit_ns) * 0.25;
}

/* Takes note of the markers that have run. An error counts as run: it must not close the gate for good. */
static void reap(struct flow *flow)
{
    while (flow->tail != flow->head && CALL(cuEventQuery, flow->ring[flow->tail % RING]) != CUDA_ERROR_NOT_READY) {
        uint32_t now = flow->tail % RING;
        flow->run = flow->counts[now];
        flow->run_seen_ns = now_ns();
        if ((int32_t)(flow->tail - flow->barrier) > 0)
            learn(flow, (flow->tail - 1) % RING, now);
        flow->tail++;
    }
}

static void record(struct flow *flow, CUstream stream, int per_thread, uint64_t count)
{
    uint32_t at = flow->head % RING;
    if (flow->head - flow->tail >= RING - 1)
        return; /* the slot before the oldest is still needed to measure it */
    if (flow->made <= at) {
        if (CALL(cuEventCreate, &flow->ring[at], CU_EVENT_DEFAULT) != CUDA_SUCCESS)
            return;
        flow->made = at + 1;
    }
    CUresult result = per_thread ? CALL(cuEventRecord_ptsz, flow->ring[at], stream)
                                 : CALL(cuEventRecord, flow->ring[at], stream);
    if (result != CUDA_SUCCESS)
        return;
    flow->counts[at] = count;
    flow->head++;
}

static double at_most(double value, double most)
{
    return value < most ? value : most;
}

/* Called with the lock held and the markers reaped. `count`: launches before the one asked for. */
static enum vgpu_pace decide(const struct flow *flow, uint64_t count, const struct vgpu_turn *turn, uint64_t left_ns,
                             bool first, uint64_t *batch, uint64_t *wait_ns)
{
    double unit = flow->unit_ns;
    bool known = unit > 0;
    uint64_t waiting = flow->tail != flow->head && count > flow->run ? count - flow->run : 0;
    double ahead = (double)waiting * unit;
    double left = ahead -
                  (double)(now_ns() - flow->run_seen_ns); /* the next marker has not run, but much before it has */
    double deep = (turn->flags & VGPU_TURN_SHORT) != 0 ? unit : DEPTH_MIN * unit;
    double room = (double)turn->window_ns > deep ? (double)turn->window_ns : deep;
    *batch = 1;
    /* half of what runs now has run, on average, and half of the next may overrun */
    if (!first && known && left_ns != UINT64_MAX &&
        (waiting > 0 && left > unit / 2 ? left : unit / 2) > (double)left_ns)
        return VGPU_PACE_STOP;
    /* Refilled when half of it has run, not launch by launch: each marker costs the device some microseconds. */
    if (flow->tail != flow->head && (known ? ahead > room / 2 : waiting >= DEPTH_MIN)) {
        *wait_ns = known ? (uint64_t)(ahead - room / 2) : WAIT_MIN_NS;
        return VGPU_PACE_WAIT;
    }
    if (known) {
        double more = at_most(room / 2, left_ns == UINT64_MAX ? room : (double)left_ns - ahead);
        *batch = more < unit ? 1 : (uint64_t)at_most(more / unit, BATCH_MAX);
    }
    return VGPU_PACE_GO;
}

/* Before the first launch of a turn: the device may still have to come to this context from another. What
 * that takes is nobody's use of it, so it is waited out (the marker has run when it is over). */
static void arrive(struct flow *flow)
{
    uint64_t until = now_ns() + ARRIVE_MAX_NS;
    while (flow->tail != flow->head && now_ns() < until) {
        sched_yield();
        reap(flow);
    }
}

enum vgpu_pace vgpu_pace(CUstream stream, int per_thread, const struct vgpu_turn *turn, uint64_t left_ns, bool first,
                         uint64_t *batch, uint64_t *wait_ns)
{
    enum vgpu_pace answer = VGPU_PACE_GO;
    bool capturing = vgpu_capture_any();
    CUstreamCaptureMode mode = capturing ? vgpu_capture_relax() : CU_STREAM_CAPTURE_MODE_GLOBAL;
    *batch = 1;
    *wait_ns = 0;
    pthread_mutex_lock(&lock);
    struct flow *flow = flow_launched(context_of(stream, per_thread));
    if (flow != NULL) {
        uint64_t count = launched();
        uint32_t last = (flow->head - 1) % RING;
        flow->used = true;
        if (flow->tail == flow->head || flow->counts[last] < count) /* not again after a wait */
            record(flow, stream, per_thread, count);
        reap(flow);
        if (first)
            arrive(flow);
        answer = decide(flow, count, turn, left_ns, first, batch, wait_ns);
        mark_after = answer == VGPU_PACE_GO && *batch <= LONG_BATCH;
    }
    pthread_mutex_unlock(&lock);
    if (capturing)
        vgpu_capture_restore(mode);
    return answer;
}

void vgpu_pace_mark_after(CUstream stream, int per_thread, uint64_t weight)
{
    if (!mark_after)
        return;
    mark_after = false;
    pthread_mutex_lock(&lock);
    struct flow *flow = flow_find(context_of(stream, per_thread));
    if (flow != NULL && flow->context != NULL)
        record(flow, stream, per_thread, launched() + weight);
    pthread_mutex_unlock(&lock);
}

bool vgpu_pace_touch(CUstream stream, int per_thread)
{
    CUcontext context = context_of(stream, per_thread);
    pthread_mutex_lock(&lock);
    struct flow *flow = flow_launched(context);
    if (flow != NULL)
        flow->used = true;
    pthread_mutex_unlock(&lock);
    return flow != NULL || context == NULL;
}

uint32_t vgpu_pace_declare(void)
{
    uint32_t devices = __atomic_load_n(&launched_to, __ATOMIC_RELAXED);
    __atomic_store_n(&declared, devices != 0 ? devices : UINT32_MAX, __ATOMIC_RELAXED);
    return devices;
}

bool vgpu_pace_strays(void)
{
    return (__atomic_load_n(&launched_to, __ATOMIC_RELAXED) & ~__atomic_load_n(&declared, __ATOMIC_RELAXED)) != 0;
}

void vgpu_pace_note(CUcontext context)
{
    pthread_mutex_lock(&lock);
    (void)flow_get(context);
    pthread_mutex_unlock(&lock);
}

bool vgpu_pace_none(void)
{
    pthread_mutex_lock(&lock);
    bool none = flows == NULL;
    pthread_mutex_unlock(&lock);
    return none;
}

void vgpu_pace_use_all(void)
{
    pthread_mutex_lock(&lock);
    for (struct flow *flow = flows; flow != NULL; flow = flow->next)
        flow->used = true;
    pthread_mutex_unlock(&lock);
}

uint64_t vgpu_pace_free(uint32_t device_count)
{
    uint32_t others = ((1u << device_count) - 1) & ~__atomic_load_n(&declared, __ATOMIC_RELAXED);
    vgpu_pace_use_all();
    return others != 0 && device_count > 1 ? STRAY_BATCH : FREE_BATCH;
}

uint64_t vgpu_pace_ahead(void)
{
    double most = 0;
    uint64_t count = launched();
    pthread_mutex_lock(&lock);
    uint64_t now = now_ns();
    for (const struct flow *flow = flows; flow != NULL; flow = flow->next) {
        if (!flow->used || flow->tail == flow->head)
            continue;
        double ahead = (double)(count - flow->run) * flow->unit_ns - (double)(now - flow->run_seen_ns);
        most = ahead > most ? ahead : most;
    }
    pthread_mutex_unlock(&lock);
    return (uint64_t)most;
}

static void begin_one(struct flow *flow)
{
    CUcontext popped;
    flow->draining = VGPU_DRAIN_BY_MARKERS;
    if (vgpu_capture_any()) /* recording a context breaks its captures */
        return;
    if (REAL(cuCtxRecordEvent) == NULL) {
        if (vgpu_drain_thread_ask(&flow->job, flow->context))
            flow->draining = VGPU_DRAIN_BY_THREAD;
        return;
    }
    if (CALL(cuCtxPushCurrent_v2, flow->context) != CUDA_SUCCESS)
        return;
    if ((flow->drain != NULL || CALL(cuEventCreate, &flow->drain, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) &&
        CALL(cuCtxRecordEvent, flow->context, flow->drain) == CUDA_SUCCESS)
        flow->draining = VGPU_DRAIN_BY_EVENT;
    CALL(cuCtxPopCurrent_v2, &popped);
}

void vgpu_drain_begin(void)
{
    CUstreamCaptureMode mode = vgpu_capture_relax();
    pthread_mutex_lock(&lock);
    for (struct flow *flow = flows; flow != NULL; flow = flow->next)
        if (flow->used)
            begin_one(flow);
    pthread_mutex_unlock(&lock);
    vgpu_capture_restore(mode);
}

static bool done_one(struct flow *flow)
{
    reap(flow);
    if (flow->draining == VGPU_DRAIN_BY_EVENT)
        return CALL(cuEventQuery, flow->drain) != CUDA_ERROR_NOT_READY;
    if (flow->draining == VGPU_DRAIN_BY_THREAD)
        return vgpu_drain_thread_done(&flow->job);
    return flow->tail == flow->head;
}

bool vgpu_drain_done(void)
{
    bool done = true;
    CUstreamCaptureMode mode = vgpu_capture_relax();
    pthread_mutex_lock(&lock);
    for (struct flow *flow = flows; flow != NULL && done; flow = flow->next)
        done = !flow->used || done_one(flow);
    pthread_mutex_unlock(&lock);
    vgpu_capture_restore(mode);
    return done;
}

void vgpu_pace_idle(void)
{
    pthread_mutex_lock(&lock);
    for (struct flow *flow = flows; flow != NULL; flow = flow->next) {
        flow->used = false;
        flow->barrier = flow->head + 1; /* the first may have come while the device was on its way */
    }
    pthread_mutex_unlock(&lock);
}

/* With the lock held, and the context alive. */
static void release(struct flow *flow)
{
    vgpu_drain_thread_forget(&flow->job);
    for (uint32_t i = 0; i < flow->made; i++)
        CALL(cuEventDestroy_v2, flow->ring[i]);
    if (flow->drain != NULL)
        CALL(cuEventDestroy_v2, flow->drain);
    free(flow);
}

void vgpu_pace_forget(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct flow **link = &flows; *link != NULL; link = &(*link)->next) {
        struct flow *flow = *link;
        if (flow->context != context)
            continue;
        *link = flow->next;
        release(flow);
        break;
    }
    note_devices();
    pthread_mutex_unlock(&lock);
}

#include "in_flight.h"

#include <pthread.h>
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

#define RING 32u     /* maximum of markers in flight for one context */
#define DEPTH_MIN 2u /* number of launches for which the window has room, however long they are */
#define BATCH_MAX 2048u
#define FREE_BATCH 4096u /* number of launches between two checks in a slice without pacing */
/* number of launches between two checks while the next launch may use a device whose slice another tenant has */
#define STRAY_BATCH 61u
#define WAIT_MIN_NS 2000u

struct context_queue {
    struct context_queue *next;
    CUcontext context;
    int device; /* index of the device in the lease, or VGPU_NOT_IN_LEASE */
    CUevent ring[RING];
    uint64_t counts[RING]; /* number of launches before each marker */
    uint32_t made;         /* number of events that exist */
    uint32_t head;         /* index of the next marker to record */
    uint32_t tail;         /* index of the oldest marker that has not completed; tail == head: none */
    /* index of the first marker since the device was last idle; times of earlier markers are not usable */
    uint32_t barrier;
    uint64_t run;         /* number of launches known to have finished */
    uint64_t run_seen_ns; /* when `run` was observed */
    double unit_ns;       /* device time of one launch of weight 1; 0: not known yet */
    CUevent drain;
    bool used;     /* whether the next drain waits for this context */
    bool launched; /* whether there was ever a launch in this context */
    enum vgpu_drain_state draining;
    struct vgpu_drain_job job;
};

static struct context_queue *queues; /* list with one record for each live context that libvgpu knows */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t launched_to; /* devices with launches, as bits */
/*
 * devices with launches that were reported to the arbiter, as bits; all bits: at the last report, no device with
 * launches was known
 */
static uint32_t declared;

static void reset(void)
{
    /*
     * in a forked child: the parent's records stay allocated, because another thread may have held the heap's lock at
     * the fork
     */
    queues = NULL;
    launched_to = 0;
    declared = 0;
    pthread_mutex_init(&lock, NULL);
}
VGPU_IN_CHILD(reset);

/* Returns the number of launches that have reached the driver, by weight. */
static uint64_t launched(void)
{
    uint64_t asked = __atomic_load_n(&vgpu_launches.asked, __ATOMIC_SEQ_CST);
    return vgpu_launches_counted() - asked;
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

static struct context_queue *queue_find(CUcontext context)
{
    for (struct context_queue *queue = queues; queue != NULL; queue = queue->next)
        if (queue->context == context)
            return queue;
    return NULL;
}

static void note_devices(void)
{
    uint32_t devices = 0;
    for (const struct context_queue *queue = queues; queue != NULL; queue = queue->next)
        if (queue->device != VGPU_NOT_IN_LEASE && queue->launched)
            devices |= 1u << queue->device;
    __atomic_store_n(&launched_to, devices, __ATOMIC_RELAXED);
}

static struct context_queue *queue_get(CUcontext context)
{
    CUdevice device;
    struct context_queue *queue = context != NULL ? queue_find(context) : NULL;
    if (queue != NULL || context == NULL || (queue = calloc(1, sizeof(*queue))) == NULL)
        return queue;
    queue->next = queues;
    queues = queue;
    queue->context = context;
    queue->device = vgpu_device_of_context(context, &device) == CUDA_SUCCESS ? vgpu_device_index(device)
                                                                             : VGPU_NOT_IN_LEASE;
    queue->run = launched();
    queue->run_seen_ns = now_ns();
    return queue;
}

/* Records a launch in the context. */
static struct context_queue *queue_launched(CUcontext context)
{
    struct context_queue *queue = queue_get(context);
    if (queue != NULL && !queue->launched) {
        queue->launched = true;
        note_devices();
    }
    return queue;
}

static void measure(struct context_queue *queue, uint32_t from, uint32_t to)
{
    float ms;
    uint64_t launches = queue->counts[to] - queue->counts[from];
    if (launches == 0 || launches > queue->counts[to] ||
        CALL(cuEventElapsedTime, &ms, queue->ring[from], queue->ring[to]) != CUDA_SUCCESS || ms < 0)
        return;
    double unit = (double)ms * 1e6 / (double)launches;
    queue->unit_ns = queue->unit_ns == 0 ? unit : queue->unit_ns + (unit - queue->unit_ns) * 0.25;
}

/*
 * Records which markers have completed. A marker with an error counts as completed, so that it cannot close the gate
 * permanently.
 */
static void reap(struct context_queue *queue)
{
    while (queue->tail != queue->head && CALL(cuEventQuery, queue->ring[queue->tail % RING]) != CUDA_ERROR_NOT_READY) {
        uint32_t now = queue->tail % RING;
        queue->run = queue->counts[now];
        queue->run_seen_ns = now_ns();
        if ((int32_t)(queue->tail - queue->barrier) > 0)
            measure(queue, (queue->tail - 1) % RING, now);
        queue->tail++;
    }
}

static void record(struct context_queue *queue, CUstream stream, int per_thread, uint64_t count)
{
    uint32_t at = queue->head % RING;
    if (queue->head - queue->tail >= RING - 1)
        return; /* the entry before the oldest marker is still needed to measure that marker */
    if (queue->made <= at) {
        if (CALL(cuEventCreate, &queue->ring[at], CU_EVENT_DEFAULT) != CUDA_SUCCESS)
            return;
        queue->made = at + 1;
    }
    CUresult result = per_thread ? CALL(cuEventRecord_ptsz, queue->ring[at], stream)
                                 : CALL(cuEventRecord, queue->ring[at], stream);
    if (result != CUDA_SUCCESS)
        return;
    queue->counts[at] = count;
    queue->head++;
}

static double at_most(double value, double most)
{
    return value < most ? value : most;
}

/*
 * Decides whether a launch may run. Preconditions: the lock is held, and completed markers are recorded. `count` is the
 * number of launches before this one.
 */
static enum vgpu_admission decide(const struct context_queue *queue, uint64_t count, const struct vgpu_turn *turn,
                                  uint64_t left_ns, bool first, uint64_t *batch, uint64_t *wait_ns)
{
    double unit = queue->unit_ns;
    bool known = unit > 0;
    uint64_t waiting = queue->tail != queue->head && count > queue->run ? count - queue->run : 0;
    double ahead = (double)waiting * unit;
    double left = ahead -
                  /* the next marker has not completed, but much of the work before it has */
                  (double)(now_ns() - queue->run_seen_ns);
    double room = (double)turn->window_ns > DEPTH_MIN * unit ? (double)turn->window_ns : DEPTH_MIN * unit;
    *batch = 1;
    /* on average half of the running launch has finished, and half of the next one may overrun the slice */
    if (!first && known && left_ns != UINT64_MAX &&
        (waiting > 0 && left > unit / 2 ? left : unit / 2) > (double)left_ns)
        return VGPU_ADMIT_STOP;
    /*
     * The queue is refilled when half of it has finished, and not after each launch, because each marker costs the
     * device some microseconds.
     */
    if (queue->tail != queue->head && (known ? ahead > room / 2 : waiting >= DEPTH_MIN)) {
        *wait_ns = known ? (uint64_t)(ahead - room / 2) : WAIT_MIN_NS;
        return VGPU_ADMIT_WAIT;
    }
    if (known) {
        double more = at_most(room / 2, left_ns == UINT64_MAX ? room : (double)left_ns - ahead);
        *batch = more < unit ? 1 : (uint64_t)at_most(more / unit, BATCH_MAX);
    }
    return VGPU_ADMIT_GO;
}

enum vgpu_admission vgpu_in_flight_admit(CUstream stream, int per_thread, const struct vgpu_turn *turn,
                                         uint64_t left_ns, bool first, uint64_t *batch, uint64_t *wait_ns)
{
    enum vgpu_admission answer = VGPU_ADMIT_GO;
    int mode = vgpu_capture_relax_if_any();
    *batch = 1;
    *wait_ns = 0;
    pthread_mutex_lock(&lock);
    struct context_queue *queue = queue_launched(context_of(stream, per_thread));
    if (queue != NULL) {
        uint64_t count = launched();
        uint32_t last = (queue->head - 1) % RING;
        queue->used = true;
        /* no marker is needed if the last one comes after all launches so far */
        if (queue->tail == queue->head || queue->counts[last] < count)
            record(queue, stream, per_thread, count);
        reap(queue);
        answer = decide(queue, count, turn, left_ns, first, batch, wait_ns);
    }
    pthread_mutex_unlock(&lock);
    vgpu_capture_restore_if_any(mode);
    return answer;
}

enum vgpu_touch vgpu_in_flight_touch(CUstream stream, int per_thread)
{
    CUcontext context = context_of(stream, per_thread);
    if (context == NULL)
        return VGPU_TOUCH_NO_CONTEXT;
    pthread_mutex_lock(&lock);
    struct context_queue *queue = queue_launched(context);
    if (queue != NULL)
        queue->used = true;
    pthread_mutex_unlock(&lock);
    return queue != NULL ? VGPU_TOUCHED : VGPU_TOUCH_NO_MEMORY;
}

uint32_t vgpu_in_flight_declare(void)
{
    uint32_t devices = __atomic_load_n(&launched_to, __ATOMIC_RELAXED);
    __atomic_store_n(&declared, devices != 0 ? devices : UINT32_MAX, __ATOMIC_RELAXED);
    return devices;
}

bool vgpu_in_flight_strays(void)
{
    return (__atomic_load_n(&launched_to, __ATOMIC_RELAXED) & ~__atomic_load_n(&declared, __ATOMIC_RELAXED)) != 0;
}

void vgpu_in_flight_note(CUcontext context)
{
    pthread_mutex_lock(&lock);
    (void)queue_get(context);
    pthread_mutex_unlock(&lock);
}

bool vgpu_in_flight_none(void)
{
    pthread_mutex_lock(&lock);
    bool none = queues == NULL;
    pthread_mutex_unlock(&lock);
    return none;
}

void vgpu_in_flight_use_all(void)
{
    pthread_mutex_lock(&lock);
    for (struct context_queue *queue = queues; queue != NULL; queue = queue->next)
        queue->used = true;
    pthread_mutex_unlock(&lock);
}

uint64_t vgpu_in_flight_free(uint32_t device_count)
{
    uint32_t others = ((1u << device_count) - 1) & ~__atomic_load_n(&declared, __ATOMIC_RELAXED);
    vgpu_in_flight_use_all();
    return others != 0 && device_count > 1 ? STRAY_BATCH : FREE_BATCH;
}

static void begin_one(struct context_queue *queue)
{
    CUcontext popped;
    queue->draining = VGPU_DRAIN_BY_MARKERS;
    if (REAL(cuCtxRecordEvent) == NULL) {
        if (!vgpu_capture_any() && vgpu_drain_thread_ask(&queue->job, queue->context))
            queue->draining = VGPU_DRAIN_BY_THREAD;
        return;
    }
    if (CALL(cuCtxPushCurrent_v2, queue->context) != CUDA_SUCCESS)
        return;
    /* an event that is recorded in a context invalidates the captures there */
    bool recordable = vgpu_capture_forbid();
    if (recordable &&
        (queue->drain != NULL || CALL(cuEventCreate, &queue->drain, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) &&
        CALL(cuCtxRecordEvent, queue->context, queue->drain) == CUDA_SUCCESS)
        queue->draining = VGPU_DRAIN_BY_EVENT;
    if (recordable)
        vgpu_capture_allow();
    CALL(cuCtxPopCurrent_v2, &popped);
}

void vgpu_drain_begin(void)
{
    CUstreamCaptureMode mode = vgpu_capture_relax();
    pthread_mutex_lock(&lock);
    for (struct context_queue *queue = queues; queue != NULL; queue = queue->next)
        if (queue->used)
            begin_one(queue);
    pthread_mutex_unlock(&lock);
    vgpu_capture_restore(mode);
}

static bool done_one(struct context_queue *queue)
{
    reap(queue);
    if (queue->draining == VGPU_DRAIN_BY_EVENT)
        return CALL(cuEventQuery, queue->drain) != CUDA_ERROR_NOT_READY;
    if (queue->draining == VGPU_DRAIN_BY_THREAD && !vgpu_drain_thread_done(&queue->job))
        return false;
    return queue->tail == queue->head;
}

bool vgpu_drain_done(void)
{
    bool done = true;
    CUstreamCaptureMode mode = vgpu_capture_relax();
    pthread_mutex_lock(&lock);
    for (struct context_queue *queue = queues; queue != NULL && done; queue = queue->next)
        done = !queue->used || done_one(queue);
    pthread_mutex_unlock(&lock);
    vgpu_capture_restore(mode);
    return done;
}

void vgpu_in_flight_idle(void)
{
    pthread_mutex_lock(&lock);
    for (struct context_queue *queue = queues; queue != NULL; queue = queue->next) {
        queue->used = false;
        queue->barrier = queue->head + 1; /* not `head`: the first marker may be recorded during a switch of contexts */
    }
    pthread_mutex_unlock(&lock);
}

/* Frees the record of a context. Preconditions: the lock is held, and the context is alive. */
static void release(struct context_queue *queue)
{
    vgpu_drain_thread_forget(&queue->job);
    for (uint32_t i = 0; i < queue->made; i++)
        CALL(cuEventDestroy_v2, queue->ring[i]);
    if (queue->drain != NULL)
        CALL(cuEventDestroy_v2, queue->drain);
    free(queue);
}

void vgpu_in_flight_forget(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct context_queue **link = &queues; *link != NULL; link = &(*link)->next) {
        struct context_queue *queue = *link;
        if (queue->context != context)
            continue;
        *link = queue->next;
        release(queue);
        break;
    }
    note_devices();
    pthread_mutex_unlock(&lock);
}

#include "evict_copy.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "functions.h"
#include "hostbuf.h"
#include "lease.h"
#include "parked.h"
#include "allocation.h"
#include "digest.h"
#include "in_child.h"

#define IN_FLIGHT 16u /* maximum of copies in flight */
/* interval between attempts to map a chunk on a full device; copying a chunk takes ten times as long */
#define ROOM_LOOK_NS 300000
#define ROOM_LOOKS 100u
#define SMALL_STACK_BYTES 16

struct copy {
    struct vgpu_allocation *allocation;
    unsigned chunk;
};
static struct copy leaving[VGPU_DIGESTS]; /* the batch of chunks whose contents are compared with their host copies */
static unsigned leaving_count;

static struct {
    CUcontext context; /* context of the stream and of the events; NULL: they do not exist */
    CUstream stream;
    CUevent events[IN_FLIGHT];
    struct copy flying[IN_FLIGHT];
    unsigned first;
    unsigned count;
} line;
static pthread_mutex_t line_lock =
    PTHREAD_MUTEX_INITIALIZER; /* held for a step of vgpu_evict_prepare, and while a context ends */
static CUresult error;
static size_t stack;   /* the program's stack limit while the limit is lowered for a checkpoint; 0: it is not lowered */
static uint64_t *told; /* the word in the slot where the size of the host buffer is published */

CUresult vgpu_evict_error(void)
{
    return error;
}

static bool good(CUresult result)
{
    if (result != CUDA_SUCCESS)
        error = result;
    return result == CUDA_SUCCESS;
}

/*
 * Makes the context of the stream and of the events current. If they do not exist, makes them in `other`. Any context
 * of the device will do, because mappings belong to the process. Returns true if a context was pushed.
 */
static bool begin(CUcontext other)
{
    CUcontext popped;
    bool fresh = line.context == NULL;
    CUcontext context = fresh ? other : line.context;
    if (!good(CALL(cuCtxPushCurrent_v2, context)))
        return false;
    bool whole = !fresh || good(CALL(cuStreamCreate, &line.stream, CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; fresh && whole && i < IN_FLIGHT; i++)
        whole = good(CALL(cuEventCreate, &line.events[i], CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
    if (whole)
        line.context = context;
    else
        CALL(cuCtxPopCurrent_v2, &popped);
    return whole;
}

static void end(void)
{
    CUcontext popped;
    CALL(cuCtxPopCurrent_v2, &popped);
}

static CUresult copy_chunk(const struct vgpu_allocation *allocation, unsigned chunk, bool out)
{
    CUdeviceptr device = vgpu_chunk_base(allocation, chunk);
    const uint32_t *pages = vgpu_chunk_pages(allocation, chunk);
    unsigned count = vgpu_chunk_page_count(allocation, chunk);
    uint64_t left = vgpu_chunk_bytes(allocation, chunk);
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS;) {
        uint64_t there, run = VGPU_HOSTBUF_PAGE_BYTES;
        void *host = vgpu_hostbuf_at(pages[i] * VGPU_HOSTBUF_PAGE_BYTES, &there);
        if (!out)
            vgpu_hostbuf_lock_at(pages[i] * VGPU_HOSTBUF_PAGE_BYTES);
        for (i++; i < count && pages[i] == pages[i - 1] + 1 && run < there; i++)
            run += VGPU_HOSTBUF_PAGE_BYTES;
        uint64_t bytes = left < run ? left : run;
        result = out ? CALL(cuMemcpyDtoHAsync_v2, host, device, bytes, line.stream)
                     : CALL(cuMemcpyHtoDAsync_v2, device, host, bytes, line.stream);
        device += bytes;
        left -= bytes;
    }
    return result;
}

/* Takes a chunk off the device whose contents are on the host. After an error it stays. */
static CUresult leave(struct vgpu_allocation *allocation, unsigned chunk)
{
    CUmemGenericAllocationHandle handle = allocation->chunks[chunk].handle;
    CUresult result = vgpu_chunk_unmap(allocation, chunk);
    if (result != CUDA_SUCCESS)
        allocation->chunks[chunk].handle = handle;
    return result;
}

/* Waits for the end of the oldest copy. If it succeeded, releases the physical memory of its chunk. */
static CUresult land(void)
{
    const struct copy *copy = &line.flying[line.first];
    CUresult result = CALL(cuEventSynchronize, line.events[line.first]);
    if (result == CUDA_SUCCESS)
        result = leave(copy->allocation, copy->chunk);
    else
        copy->allocation->chunks[copy->chunk].known = false;
    line.first = (line.first + 1) % IN_FLIGHT;
    line.count--;
    return result;
}

static CUresult take_off(struct vgpu_allocation *allocation, unsigned chunk)
{
    unsigned next = (line.first + line.count) % IN_FLIGHT;
    CUresult result = line.count == IN_FLIGHT ? land() : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = copy_chunk(allocation, chunk, true);
    if (result == CUDA_SUCCESS)
        result = CALL(cuEventRecord, line.events[next], line.stream);
    if (result == CUDA_SUCCESS) {
        line.flying[next] = (struct copy){allocation, chunk};
        line.count++;
    }
    return result;
}

struct vgpu_evict_bytes vgpu_evict_count(void)
{
    struct vgpu_evict_bytes bytes = {0};
    for (const struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL;
         allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++) {
            bytes.all += vgpu_chunk_bytes(allocation, i);
            bytes.here += allocation->chunks[i].handle != 0 ? vgpu_chunk_bytes(allocation, i) : 0;
        }
    return bytes;
}

/*
 * Marks the chunks to evict, so that at most `kept` bytes remain on the device. Returns the number of pages of the host
 * buffer that these chunks lack.
 */
static uint64_t choose(uint64_t here, uint64_t kept)
{
    uint64_t pages = 0;
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++) {
            struct vgpu_chunk *chunk = &allocation->chunks[i];
            chunk->leaves = chunk->handle != 0 && here > kept;
            if (!chunk->leaves)
                continue;
            here -= vgpu_chunk_bytes(allocation, i);
            pages += chunk->placed ? 0 : vgpu_chunk_page_count(allocation, i);
        }
    return pages;
}

/*
 * Makes room for `pages` pages in the host buffer. Drops copies of chunks that stay on the device; if that is not
 * enough, the buffer grows.
 */
static CUresult make_room(uint64_t pages)
{
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count && vgpu_hostbuf_free() < pages; i++)
            if (allocation->chunks[i].handle != 0 && !allocation->chunks[i].leaves)
                vgpu_chunk_forget(allocation, i);
    uint64_t unowned = vgpu_hostbuf_free();
    return unowned >= pages ? CUDA_SUCCESS
                            : vgpu_hostbuf_grow(vgpu_hostbuf_bytes() + (pages - unowned) * VGPU_HOSTBUF_PAGE_BYTES);
}

/* Computes the digests of the chunks in `leaving`. Returns false if they cannot be computed. */
static bool digest(struct vgpu_digest *digests)
{
    bool good = vgpu_digest_begin();
    for (unsigned i = 0; i < leaving_count && good; i++) {
        const struct copy *one = &leaving[i];
        good = vgpu_digest_add(i, vgpu_chunk_base(one->allocation, one->chunk),
                               vgpu_chunk_bytes(one->allocation, one->chunk), line.stream) == CUDA_SUCCESS;
    }
    return good && vgpu_digest_read(digests, leaving_count, line.stream) == CUDA_SUCCESS;
}

/* Evicts the chunks in `leaving`. A chunk whose contents equal its copy on the host is not copied again. */
static CUresult take_off_all(uint32_t *page)
{
    static struct vgpu_digest digests[VGPU_DIGESTS];
    bool known = digest(digests);
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < leaving_count && result == CUDA_SUCCESS; i++) {
        struct vgpu_allocation *allocation = leaving[i].allocation;
        struct vgpu_chunk *chunk = &allocation->chunks[leaving[i].chunk];
        if (known && chunk->known && memcmp(&chunk->digest, &digests[i], sizeof(digests[i])) == 0) {
            result = leave(allocation, leaving[i].chunk);
            continue;
        }
        chunk->known = false;
        if (!chunk->placed && !vgpu_chunk_place(allocation, leaving[i].chunk, page))
            return CUDA_ERROR_OUT_OF_MEMORY;
        result = take_off(allocation, leaving[i].chunk);
        chunk->known = known && result == CUDA_SUCCESS;
        chunk->digest = digests[i];
    }
    return result;
}

static bool all_out(void)
{
    uint32_t page = 0;
    CUresult result = CUDA_SUCCESS;
    leaving_count = 0;
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count && result == CUDA_SUCCESS; i++) {
            if (!allocation->chunks[i].leaves)
                continue;
            leaving[leaving_count++] = (struct copy){allocation, i};
            if (leaving_count < VGPU_DIGESTS)
                continue;
            result = take_off_all(&page);
            leaving_count = 0;
        }
    if (result == CUDA_SUCCESS)
        result = take_off_all(&page);
    while (line.count > 0) {
        CUresult landed = land();
        result = result == CUDA_SUCCESS ? landed : result;
    }
    return good(result);
}

bool vgpu_evict_out(uint64_t kept)
{
    const struct vgpu_allocation *first = vgpu_allocations();
    struct vgpu_evict_bytes now = vgpu_evict_count();
    if (now.here <= kept)
        return true;
    if (!begin(first->context))
        return false;
    bool done = good(vgpu_hostbuf_lock()) && good(make_room(choose(now.here, kept))) && all_out();
    __atomic_store_n(told, vgpu_hostbuf_bytes(), __ATOMIC_SEQ_CST);
    end();
    return done;
}

void vgpu_evict_park(void)
{
    const struct vgpu_allocation *first = vgpu_allocations();
    if (first == NULL || !begin(first->context))
        return;
    vgpu_parked_out(line.stream);
    end();
}

void vgpu_evict_ready(void)
{
    if (line.context == NULL || !begin(line.context))
        return;
    vgpu_hostbuf_unlock();
    if (stack == 0 && (CALL(cuCtxGetLimit, &stack, CU_LIMIT_STACK_SIZE) != CUDA_SUCCESS ||
                       CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, SMALL_STACK_BYTES) != CUDA_SUCCESS))
        stack = 0;
    end();
}

/*
 * Sets the context's stack limit back to the program's value. Returns CUDA_ERROR_OUT_OF_MEMORY if the device has no room
 * for the local memory.
 */
static CUresult give_stack(void)
{
    CUresult result = stack == 0 ? CUDA_SUCCESS : CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, stack);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return result;
    stack = 0;
    return CUDA_SUCCESS;
}

static bool has_context(const struct vgpu_allocation *allocation, void *context)
{
    *(CUcontext *)context = allocation->context;
    return true;
}

static bool prepare_step(uint64_t bytes)
{
    uint64_t made = vgpu_hostbuf_bytes();
    uint64_t lacking = bytes > made ? bytes - made : 0;
    uint64_t step = lacking < VGPU_PREPARE_STEP_BYTES ? lacking : VGPU_PREPARE_STEP_BYTES;
    CUcontext context = NULL;
    error = CUDA_SUCCESS;
    if ((lacking < VGPU_PREPARE_STEP_BYTES && lacking <= bytes / VGPU_PREPARED_PART) ||
        vgpu_allocation_find(has_context, &context, false) == NULL || !begin(context))
        return false;
    (void)vgpu_digest_begin(); /* compiles the digest kernel now, so that the eviction does not wait for it */
    bool grown = good(vgpu_hostbuf_lock()) && good(vgpu_hostbuf_grow(made + step));
    __atomic_store_n(told, vgpu_hostbuf_bytes(), __ATOMIC_SEQ_CST);
    end();
    return grown;
}

bool vgpu_evict_prepare(uint64_t bytes)
{
    pthread_mutex_lock(&line_lock);
    bool grown = prepare_step(bytes);
    pthread_mutex_unlock(&line_lock);
    return grown;
}

/*
 * Maps a chunk. If the device is full, tries again up to ROOM_LOOKS times, because another tenant may be freeing memory
 * chunk by chunk. Copies of this process that are in flight continue meanwhile.
 */
static CUresult map_soon(struct vgpu_allocation *allocation, unsigned chunk, bool (*stop)(void))
{
    const struct timespec pause = {.tv_nsec = ROOM_LOOK_NS};
    CUresult result = vgpu_chunk_map(allocation, chunk);
    for (unsigned i = 0; i < ROOM_LOOKS && result == CUDA_ERROR_OUT_OF_MEMORY && (stop == NULL || !stop()); i++) {
        nanosleep(&pause, NULL);
        result = vgpu_chunk_map(allocation, chunk);
    }
    return result;
}

/*
 * Maps the chunks that are out, and starts to copy them in. Returns false after an error, or if `stop` returned true.
 * The chunks mapped so far are then marked `fresh`.
 */
static bool bring_in(bool (*stop)(void))
{
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++) {
            if (allocation->chunks[i].handle != 0)
                continue;
            if ((stop != NULL && stop()) || !good(map_soon(allocation, i, stop)))
                return false;
            if (!good(copy_chunk(allocation, i, false))) {
                CALL(cuStreamSynchronize, line.stream); /* waits, because a part of the chunk's copy may be in flight */
                vgpu_chunk_unmap(allocation, i);
                return false;
            }
            allocation->chunks[i].fresh = true;
        }
    return true;
}

static void settle(bool stays)
{
    for (struct vgpu_allocation *allocation = vgpu_allocations(); allocation != NULL; allocation = allocation->next)
        for (unsigned i = 0; i < allocation->chunk_count; i++) {
            if (!stays && allocation->chunks[i].fresh)
                vgpu_chunk_unmap(allocation, i);
            allocation->chunks[i].fresh = false;
        }
}

bool vgpu_evict_in(bool (*stop)(void))
{
    const struct vgpu_allocation *first = vgpu_allocations();
    if (first == NULL && stack == 0)
        return true;
    if (!begin(first == NULL ? NULL : first->context))
        return false;
    bool mapped = good(vgpu_parked_in(line.stream, stop)) && bring_in(stop) && good(give_stack());
    bool whole = good(CALL(cuStreamSynchronize, line.stream)) && mapped;
    /*
     * If the device is out of memory, the chunks that are back on it stay, and the next call continues. After any other
     * error, the chunks that came back are unmapped again.
     */
    if (whole || error != CUDA_ERROR_OUT_OF_MEMORY)
        settle(whole);
    end();
    return whole;
}

void vgpu_evict_in_undo(void)
{
    CUcontext popped;
    if (line.context == NULL || CALL(cuCtxPushCurrent_v2, line.context) != CUDA_SUCCESS)
        return;
    settle(false);
    vgpu_parked_away();
    CALL(cuCtxPopCurrent_v2, &popped);
}

void vgpu_evict_stop(void)
{
    pthread_mutex_lock(&line_lock);
}

void vgpu_evict_go_on(void)
{
    pthread_mutex_unlock(&line_lock);
}

void vgpu_evict_forget(CUcontext context)
{
    if (line.context == context) {
        memset(&line, 0, sizeof(line));
        stack = 0;
        vgpu_digest_forget();
        vgpu_hostbuf_unlocked();
    }
}

void vgpu_evict_start(uint64_t *host_bytes, uint32_t *phase)
{
    told = host_bytes;
    vgpu_parked_start(phase);
}

static void reset(void)
{
    memset(&line, 0, sizeof(line));
    stack = 0;
    pthread_mutex_init(&line_lock, NULL);
    vgpu_hostbuf_reset();
}
VGPU_IN_CHILD(reset);

/*
 * Device addresses of the simulated driver, and the memory behind them.
 *
 * Device memory is host memory that costs nothing until it is touched. It is one reservation of addresses over one
 * sparse file in memory, cut into 2 MiB pages, so that another process can map a piece of the file (ipc.c). A request
 * above 1 MiB gets its own pages; smaller requests of a context share a page that is cut into equal slots (a slab), as
 * in the real driver. Every lookup goes by page number, so its cost does not grow with the number of allocations.
 */
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "internal.h"

CU_ENDS(cu_block_end, cu_block_ends);

#define ARENA_MOST (UINT64_C(4) << 40)
/* least size of the reservation that is tried: with a limit on address space, or a sanitizer, a larger one may fail */
#define ARENA_LEAST (UINT64_C(64) << 30)
#define PAGE SIM_PAGE_BYTES
#define SMALL_MAX (UINT64_C(1) << 20)
#define CLASS_MIN 512u

struct slab {
    CUdeviceptr base;
    uint32_t class_bytes, slots, used, scan;
    struct slab *next, *previous; /* links of the list of slabs of the same class that have free slots */
    struct cu_block *blocks;
};

struct page {
    struct cu_block *block; /* the block that owns the page; NULL: small blocks share the page (a slab) */
    struct slab *slab;
};

struct hole {
    CUdeviceptr base;
    uint64_t bytes;
    struct hole *next;
};

static char *g_base;
/* file descriptor of the memory; -1: this process cannot have a file of that size, and shares no memory */
static int g_file = -1;
static uint64_t g_size;
static uint64_t g_next; /* number of bytes that were ever handed out */
static struct page *g_pages;
static struct hole *g_holes;

static void *reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static int new_file(uint64_t bytes)
{
    struct rlimit most;
    /* with a file above RLIMIT_FSIZE the kernel would end the process by SIGXFSZ */
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur < bytes)
        return -1;
    int fd = memfd_create("vgpu-sim-device-memory", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool start(void)
{
    if (g_base != NULL)
        return true;
    char *p = NULL;
    uint64_t size = ARENA_MOST;
    while ((p = reserve(size + PAGE)) == NULL && size > ARENA_LEAST)
        size /= 2;
    struct page *pages = p == NULL ? NULL : reserve(size / PAGE * sizeof(*pages));
    if (pages == NULL)
        return false;
    madvise(p, size + PAGE, MADV_DONTDUMP);
    g_size = size;
    g_pages = pages;
    g_base = (char *)(((uintptr_t)p + PAGE - 1) / PAGE * PAGE);
    g_file = new_file(size);
    if (g_file >= 0 &&
        mmap(g_base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, g_file, 0) == MAP_FAILED) {
        close(g_file);
        g_file = -1;
    }
    return true;
}

void cu_arena_restore(CUdeviceptr p, uint64_t bytes)
{
    if (g_file >= 0)
        mmap((void *)p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, g_file,
             (off_t)(p - (CUdeviceptr)g_base));
    else
        mmap((void *)p, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

int cu_arena_file(CUdeviceptr p, uint64_t *offset)
{
    bool started = start();
    *offset = p - (CUdeviceptr)g_base;
    return started ? g_file : -1;
}

bool cu_in_arena(CUdeviceptr p)
{
    return g_base != NULL && p >= (CUdeviceptr)g_base && p < (CUdeviceptr)g_base + g_size;
}

static struct page *page_of(CUdeviceptr p)
{
    return &g_pages[(p - (CUdeviceptr)g_base) / PAGE];
}

CUdeviceptr cu_arena_take(uint64_t bytes)
{
    if (!start())
        return 0;
    for (struct hole **at = &g_holes; *at != NULL; at = &(*at)->next) {
        struct hole *h = *at;
        if (h->bytes < bytes)
            continue;
        CUdeviceptr p = h->base;
        h->base += bytes;
        h->bytes -= bytes;
        if (h->bytes == 0) {
            *at = h->next;
            free(h);
        }
        return p;
    }
    if (bytes > g_size - g_next)
        return 0;
    CUdeviceptr p = (CUdeviceptr)g_base + g_next;
    g_next += bytes;
    return p;
}

void cu_arena_give(CUdeviceptr p, uint64_t bytes)
{
    madvise((void *)p, bytes, g_file >= 0 ? MADV_REMOVE : MADV_DONTNEED); /* later reads return zeros */
    struct hole **at = &g_holes;
    while (*at != NULL && (*at)->base + (*at)->bytes < p)
        at = &(*at)->next;
    if (*at != NULL && (*at)->base + (*at)->bytes == p) {
        (*at)->bytes += bytes;
    } else {
        struct hole *h = malloc(sizeof(*h));
        if (h == NULL)
            return; /* the addresses are leaked: no later allocation gets them */
        *h = (struct hole){p, bytes, *at};
        *at = h;
    }
    struct hole *h = *at, *after = h->next;
    if (after != NULL && h->base + h->bytes == after->base) {
        h->bytes += after->bytes;
        h->next = after->next;
        free(after);
    }
}

static uint32_t class_of(size_t size)
{
    uint32_t c = 0;
    while ((size_t)CLASS_MIN << c < size)
        c++;
    return c;
}

static void link_slab(struct slab **head, struct slab *s)
{
    s->previous = NULL;
    s->next = *head;
    if (*head != NULL)
        (*head)->previous = s;
    *head = s;
}

static void unlink_slab(struct slab **head, struct slab *s)
{
    if (s->previous != NULL)
        s->previous->next = s->next;
    else
        *head = s->next;
    if (s->next != NULL)
        s->next->previous = s->previous;
}

static struct slab *new_slab(CUcontext ctx, uint32_t class, CUresult *why)
{
    int ordinal = ctx->ordinal;
    *why = cu_charge(ordinal, SIM_PLAIN, PAGE);
    if (*why != CUDA_SUCCESS)
        return NULL;
    *why = CUDA_ERROR_OUT_OF_MEMORY;
    struct slab *s = calloc(1, sizeof(*s));
    uint32_t slots = (uint32_t)(PAGE / ((uint64_t)CLASS_MIN << class));
    struct cu_block *blocks = calloc(slots, sizeof(*blocks));
    CUdeviceptr base = cu_arena_take(PAGE);
    if (s == NULL || blocks == NULL || base == 0) {
        free(s);
        free(blocks);
        cu_uncharge(ordinal, SIM_PLAIN, PAGE);
        return NULL;
    }
    *s = (struct slab){.base = base, .class_bytes = CLASS_MIN << class, .slots = slots, .blocks = blocks};
    page_of(base)->slab = s;
    link_slab(&ctx->room[class], s);
    return s;
}

static CUresult alloc_small(CUcontext ctx, size_t size, CUdeviceptr *out)
{
    uint32_t class = class_of(size);
    CUresult why = CUDA_SUCCESS;
    struct slab *s = ctx->room[class];
    if (s == NULL)
        s = new_slab(ctx, class, &why);
    if (s == NULL)
        return why;
    uint32_t i = s->scan; /* all slots below `scan` are in use */
    while (s->blocks[i].size != 0)
        i++;
    s->scan = i + 1;
    if (++s->used == s->slots)
        unlink_slab(&ctx->room[class], s);
    s->blocks[i] = (struct cu_block){.base = s->base + (uint64_t)i * s->class_bytes,
                                     .size = size,
                                     .kind = SIM_PLAIN,
                                     .ordinal = ctx->ordinal,
                                     .ctx = ctx,
                                     .id = ++cu.next_id};
    *out = s->blocks[i].base;
    return CUDA_SUCCESS;
}

static void free_small(struct slab *s, struct cu_block *b)
{
    int ordinal = b->ordinal;
    uint32_t class = class_of(s->class_bytes), i = (uint32_t)(b - s->blocks);
    struct slab **head = &b->ctx->room[class];
    CU_EACH_END(cu_block_ends, b);
    b->size = 0;
    if (i < s->scan)
        s->scan = i;
    if (s->used-- == s->slots)
        link_slab(head, s);
    if (s->used > 0)
        return;
    unlink_slab(head, s);
    page_of(s->base)->slab = NULL;
    cu_arena_give(s->base, PAGE);
    cu_uncharge(ordinal, SIM_PLAIN, PAGE);
    free(s->blocks);
    free(s);
}

static CUresult charge_block(CUcontext ctx, enum sim_kind kind, CUmemoryPool pool, uint64_t bytes)
{
    return pool != NULL ? cu_pool_charge(pool, bytes) : cu_charge(ctx->ordinal, kind, bytes);
}

static void uncharge_block(const struct cu_block *b, uint64_t bytes)
{
    if (b->pool != NULL)
        cu_pool_uncharge(b->pool, bytes);
    else
        cu_uncharge(b->ordinal, b->kind, bytes);
}

static CUresult alloc_large(CUcontext ctx, enum sim_kind kind, CUmemoryPool pool, size_t size, CUdeviceptr *out)
{
    CU_CHECK(size <= ARENA_MOST, CUDA_ERROR_OUT_OF_MEMORY);
    uint64_t bytes = cu_round_page(size);
    CU_TRY(charge_block(ctx, kind, pool, bytes));
    struct cu_block *b = calloc(1, sizeof(*b));
    CUdeviceptr base = b == NULL ? 0 : cu_arena_take(bytes);
    struct cu_block block = {.base = base,
                             .size = size,
                             .kind = kind,
                             .ordinal = ctx->ordinal,
                             .ctx = ctx,
                             .pool = pool,
                             .id = ++cu.next_id};
    if (base == 0) {
        uncharge_block(&block, bytes);
        free(b);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *b = block;
    for (uint64_t at = 0; at < bytes; at += PAGE)
        page_of(base + at)->block = b;
    *out = base;
    return CUDA_SUCCESS;
}

CUresult cu_block_place(CUcontext ctx, CUmemoryPool pool, struct cu_graph_memory *memory, CUdeviceptr base, size_t size)
{
    uint64_t bytes = cu_round_page(size);
    struct cu_block *b = calloc(1, sizeof(*b));
    CU_CHECK(b != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = cu_pool_charge(pool, bytes);
    if (result != CUDA_SUCCESS) {
        free(b);
        return result;
    }
    *b = (struct cu_block){.base = base,
                           .size = size,
                           .kind = SIM_POOL,
                           .ordinal = ctx->ordinal,
                           .ctx = ctx,
                           .pool = pool,
                           .id = ++cu.next_id,
                           .memory = memory};
    for (uint64_t at = 0; at < bytes; at += PAGE)
        page_of(base + at)->block = b;
    return CUDA_SUCCESS;
}

CUresult cu_block_import(CUcontext ctx, CUmemoryPool pool, int fd, uint64_t offset, size_t size, CUdeviceptr *out)
{
    uint64_t inside = offset % PAGE, bytes = cu_round_page(inside + size);
    struct cu_block *b = start() ? calloc(1, sizeof(*b)) : NULL;
    CUdeviceptr base = b == NULL ? 0 : cu_arena_take(bytes);
    if (base == 0 || mmap((void *)base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
                          (off_t)(offset - inside)) == MAP_FAILED) {
        free(b);
        return CUDA_ERROR_MAP_FAILED;
    }
    *b = (struct cu_block){.base = base + inside,
                           .size = size,
                           .kind = pool != NULL ? SIM_POOL : SIM_PLAIN,
                           .ordinal = ctx->ordinal,
                           .ctx = ctx,
                           .pool = pool,
                           .id = ++cu.next_id,
                           .imported = true,
                           .external = pool != NULL};
    for (uint64_t at = 0; at < bytes; at += PAGE)
        page_of(base + at)->block = b;
    *out = b->base;
    return CUDA_SUCCESS;
}

CUresult cu_alloc(CUcontext ctx, enum sim_kind kind, CUmemoryPool pool, size_t size, CUdeviceptr *out)
{
    if (kind == SIM_PLAIN && size <= SMALL_MAX)
        return alloc_small(ctx, size, out);
    return alloc_large(ctx, kind, pool, size, out);
}

struct cu_block *cu_block_at(CUdeviceptr p)
{
    if (!cu_in_arena(p))
        return NULL;
    struct page *page = page_of(p);
    if (page->block != NULL)
        return p - page->block->base < page->block->size ? page->block : NULL;
    if (page->slab == NULL)
        return NULL;
    struct cu_block *b = &page->slab->blocks[(p - page->slab->base) / page->slab->class_bytes];
    return b->size != 0 && p - b->base < b->size ? b : NULL;
}

static void free_large(struct cu_block *b)
{
    CUdeviceptr base = b->base - b->base % PAGE;
    uint64_t bytes = cu_round_page(b->base - base + b->size);
    for (uint64_t at = 0; at < bytes; at += PAGE)
        page_of(base + at)->block = NULL;
    if (b->imported)
        cu_arena_restore(base, bytes);
    if (b->memory == NULL)
        cu_arena_give(base, bytes);
    CU_EACH_END(cu_block_ends, b);
    if (!b->imported)
        uncharge_block(b, bytes);
    free(b);
}

void cu_block_close(struct cu_block *b)
{
    free_large(b);
}

CUresult cu_free(CUdeviceptr p)
{
    struct cu_block *b = cu_block_at(p);
    if (b == NULL || b->base != p || (b->imported && !b->external))
        return CUDA_ERROR_INVALID_VALUE;
    struct slab *s = page_of(p)->slab;
    if (s != NULL)
        free_small(s, b);
    else
        free_large(b);
    return CUDA_SUCCESS;
}

static void free_where(CUcontext ctx, CUmemoryPool pool)
{
    for (uint64_t i = 0; i < g_next / PAGE; i++) {
        struct page *page = &g_pages[i];
        struct cu_block *b = page->block;
        if (b != NULL && (ctx != NULL ? b->ctx == ctx && b->pool == NULL : b->pool == pool))
            free_large(b);
        for (uint32_t j = 0; ctx != NULL && page->slab != NULL && j < page->slab->slots; j++)
            if (page->slab->blocks[j].size != 0 && page->slab->blocks[j].ctx == ctx)
                free_small(page->slab, &page->slab->blocks[j]);
    }
}

void cu_free_of_pool(CUmemoryPool pool)
{
    free_where(NULL, pool);
}

static void free_of_context(CUcontext ctx)
{
    free_where(ctx, NULL);
}
CU_AT_END(cu_context_end, cu_context_ends, free_of_context);

/*
 * Virtual memory management: physical handles, address ranges, and mappings of handles into ranges. Physical memory
 * that cannot be exported is in one sparse file, so that neighbouring mappings are one mapping for the kernel. Each
 * allocation that may be exported has a file of its own, whose descriptor is exported; the file's last page identifies
 * it. Exported memory stays charged to its owner alone.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define SHARE_MAGIC UINT64_C(0x3152414853554756)

struct share { /* the last page of an exportable file, behind the memory */
    uint64_t magic, size;
    uint32_t card; /* index of the card that has the memory */
    CUmemAllocationProp prop;
};

struct physical {
    CUmemGenericAllocationHandle id;
    uint64_t size, offset;
    int file; /* the allocation's own file; -1: the common file */
    bool imported;
    bool shared; /* imported or exported: then the process cannot be suspended */
    uint32_t refs, maps;
    int ordinal; /* -1: memory of the host */
    CUmemAllocationProp prop;
    struct physical *next;
};

struct mapping {
    CUdeviceptr base;
    uint64_t size;
    struct physical *memory;
    unsigned long long access;
    struct mapping *next;
};

struct reservation {
    CUdeviceptr base;
    uint64_t size;
    struct reservation *next;
};

static struct physical *g_physical;
static struct mapping *g_mappings;
static struct reservation *g_reservations;
static int g_file = -1;
static uint64_t g_file_end;

static struct physical **find_physical(CUmemGenericAllocationHandle id)
{
    struct physical **at = &g_physical;
    while (*at != NULL && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static struct mapping *mapping_at(CUdeviceptr p)
{
    for (struct mapping *m = g_mappings; m != NULL; m = m->next)
        if (p - m->base < m->size)
            return m;
    return NULL;
}

bool cu_vmm_covers(CUdeviceptr p, size_t size)
{
    while (size > 0) {
        const struct mapping *m = mapping_at(p);
        if (m == NULL || m->access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return false;
        uint64_t rest = m->base + m->size - p;
        if (rest >= size)
            return true;
        p += rest;
        size -= rest;
    }
    return true;
}

int cu_vmm_ordinal(CUdeviceptr p)
{
    const struct mapping *m = mapping_at(p);
    return m == NULL ? -1 : m->memory->ordinal;
}

int cu_vmm_file(CUdeviceptr p, uint64_t *offset, size_t *bytes)
{
    const struct mapping *m = mapping_at(p);
    if (m == NULL)
        return -1;
    uint64_t inside = p - m->base;
    if (*bytes > m->size - inside)
        *bytes = m->size - inside;
    *offset = m->memory->offset + inside;
    return m->memory->file >= 0 ? m->memory->file : g_file;
}

static CUresult check_prop(const CUmemAllocationProp *prop, int *ordinal)
{
    CU_CHECK(prop != NULL && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        CU_CHECK(prop->location.id >= 0 && prop->location.id < cu.device_count, CUDA_ERROR_INVALID_DEVICE);
        *ordinal = prop->location.id;
        return CUDA_SUCCESS;
    }
    *ordinal = -1;
    return prop->location.type == CU_MEM_LOCATION_TYPE_HOST || prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    int ordinal;
    CU_TRY(cu_enter("cuMemGetAllocationGranularity"));
    CU_TRY(check_prop(prop, &ordinal));
    CU_CHECK(granularity != NULL && option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CUDA_ERROR_INVALID_VALUE);
    *granularity = SIM_PAGE_BYTES;
    return CUDA_SUCCESS;
}

static bool find_place(struct physical *p, const CUmemAllocationProp *prop, uint64_t size)
{
    bool own = (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
    if (own) {
        p->file = memfd_create("vgpu-sim-shared-memory", MFD_CLOEXEC);
        return p->file >= 0 && ftruncate(p->file, (off_t)(size + sizeof(struct share))) == 0;
    }
    if (g_file < 0)
        g_file = memfd_create("vgpu-sim-device-memory", MFD_CLOEXEC);
    if (g_file < 0 || ftruncate(g_file, (off_t)(g_file_end + size)) != 0)
        return false;
    p->offset = g_file_end;
    g_file_end += size;
    return true;
}

static void keep(struct physical *p, const CUmemAllocationProp *prop, uint64_t size)
{
    p->id = ++cu.next_id;
    p->size = size;
    p->refs = 1;
    p->prop = *prop;
    p->next = g_physical;
    g_physical = p;
}

static CUresult create_locked(struct physical *p, const CUmemAllocationProp *prop, uint64_t size)
{
    if (p->ordinal >= 0) {
        CU_CHECK(cu.devices[p->ordinal].use != NULL, CUDA_ERROR_INVALID_CONTEXT);
        CU_TRY(cu_charge(p->ordinal, SIM_VMM, size));
    }
    if (find_place(p, prop, size)) {
        keep(p, prop, size);
        return CUDA_SUCCESS;
    }
    if (p->ordinal >= 0)
        cu_uncharge(p->ordinal, SIM_VMM, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags)
{
    int ordinal;
    CU_TRY(cu_enter("cuMemCreate"));
    CU_TRY(check_prop(prop, &ordinal));
    CU_CHECK(handle != NULL && flags == 0 && size > 0 && size % SIM_PAGE_BYTES == 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK((prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0, CUDA_ERROR_NOT_SUPPORTED);
    struct physical *p = calloc(1, sizeof(*p));
    CU_CHECK(p != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    p->ordinal = ordinal;
    p->file = -1;
    cu_lock();
    CUresult result = create_locked(p, prop, size);
    if (result == CUDA_SUCCESS)
        *handle = p->id;
    else
        free(p);
    cu_unlock();
    return result;
}

static void drop_if_unused(struct physical **at)
{
    struct physical *p = *at;
    if (p->refs > 0 || p->maps > 0)
        return;
    if (p->file >= 0)
        close(p->file);
    else
        fallocate(g_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->offset, (off_t)p->size);
    if (p->shared)
        cu_cannot_suspend(-1);
    if (p->ordinal >= 0 && !p->imported)
        cu_uncharge(p->ordinal, SIM_VMM, p->size);
    *at = p->next;
    free(p);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CU_TRY(cu_enter("cuMemRelease"));
    cu_lock();
    struct physical **at = find_physical(handle);
    bool good = *at != NULL && (*at)->refs > 0;
    if (good) {
        (*at)->refs--;
        drop_if_unused(at);
    }
    cu_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags)
{
    CU_TRY(cu_enter("cuMemAddressReserve"));
    (void)addr; /* the address is a hint, which the real driver may ignore, too */
    CU_CHECK(out != NULL && flags == 0 && size > 0 && size % SIM_PAGE_BYTES == 0 &&
                 (alignment & (alignment - 1)) == 0 && alignment <= SIM_PAGE_BYTES,
             CUDA_ERROR_INVALID_VALUE);
    struct reservation *r = calloc(1, sizeof(*r));
    CU_CHECK(r != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    cu_lock();
    r->base = cu_arena_take(size);
    r->size = size;
    if (r->base != 0) {
        r->next = g_reservations;
        g_reservations = r;
        *out = r->base;
    }
    cu_unlock();
    if (r->base != 0)
        return CUDA_SUCCESS;
    free(r);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool any_mapping(CUdeviceptr p, uint64_t size)
{
    for (const struct mapping *m = g_mappings; m != NULL; m = m->next)
        if (m->base < p + size && p < m->base + m->size)
            return true;
    return false;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t size)
{
    CU_TRY(cu_enter("cuMemAddressFree"));
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    cu_lock();
    for (struct reservation **at = &g_reservations; *at != NULL; at = &(*at)->next) {
        struct reservation *r = *at;
        if (r->base != p || r->size != size || any_mapping(p, size))
            continue;
        *at = r->next;
        cu_arena_give(p, size);
        free(r);
        result = CUDA_SUCCESS;
        break;
    }
    cu_unlock();
    return result;
}

static bool is_reserved(CUdeviceptr p, uint64_t size)
{
    for (const struct reservation *r = g_reservations; r != NULL; r = r->next)
        if (p >= r->base && p + size <= r->base + r->size)
            return true;
    return false;
}

static CUresult map_locked(CUdeviceptr p, size_t size, CUmemGenericAllocationHandle handle)
{
    struct physical *memory = *find_physical(handle);
    CU_CHECK(memory != NULL && size == memory->size && is_reserved(p, size) && !any_mapping(p, size),
             CUDA_ERROR_INVALID_VALUE);
    struct mapping *m = calloc(1, sizeof(*m));
    CU_CHECK(m != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    if (mmap((void *)p, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             memory->file >= 0 ? memory->file : g_file, (off_t)memory->offset) == MAP_FAILED) {
        free(m);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *m = (struct mapping){p, size, memory, CU_MEM_ACCESS_FLAGS_PROT_NONE, g_mappings};
    g_mappings = m;
    memory->maps++;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    CU_TRY(cu_enter("cuMemMap"));
    CU_CHECK(offset == 0 && flags == 0 && size > 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = map_locked(p, size, handle);
    cu_unlock();
    return result;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t size)
{
    CU_TRY(cu_enter("cuMemUnmap"));
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    cu_lock();
    for (struct mapping **at = &g_mappings; *at != NULL;) {
        struct mapping *m = *at;
        if (m->base < p || m->base + m->size > p + size) {
            at = &m->next;
            continue;
        }
        cu_arena_restore(m->base, m->size);
        *at = m->next;
        m->memory->maps--;
        drop_if_unused(find_physical(m->memory->id));
        free(m);
        result = CUDA_SUCCESS;
    }
    cu_unlock();
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    CU_TRY(cu_enter("cuMemSetAccess"));
    CU_CHECK(desc != NULL && count > 0 && size > 0, CUDA_ERROR_INVALID_VALUE);
    bool any = false;
    cu_lock();
    for (struct mapping *m = g_mappings; m != NULL; m = m->next) {
        if (m->base >= p && m->base + m->size <= p + size) {
            m->access = desc[0].flags;
            any = true;
        }
    }
    cu_unlock();
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr p)
{
    CU_TRY(cu_enter("cuMemGetAccess"));
    CU_CHECK(flags != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    const struct mapping *m = mapping_at(p);
    *flags = m == NULL ? 0 : m->access;
    cu_unlock();
    return m == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    CU_TRY(cu_enter("cuMemRetainAllocationHandle"));
    CU_CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    const struct mapping *m = mapping_at((CUdeviceptr)addr);
    if (m != NULL) {
        m->memory->refs++;
        *handle = m->memory->id;
    }
    cu_unlock();
    return m == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    CU_TRY(cu_enter("cuMemGetAllocationPropertiesFromHandle"));
    CU_CHECK(prop != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    const struct physical *p = *find_physical(handle);
    if (p != NULL)
        *prop = p->prop;
    cu_unlock();
    return p == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Writes the last page of an exported file. A restore may have moved the memory to another card since it was made. */
static bool write_share(const struct physical *p)
{
    struct share share = {.magic = SHARE_MAGIC, .size = p->size, .prop = p->prop};
    if (p->ordinal >= 0)
        share.card = cu.devices[p->ordinal].device;
    return pwrite(p->file, &share, sizeof(share), (off_t)p->size) == sizeof(share);
}

/*
 * Returns the process's own number of the card that has the memory; 0 for host memory. -1: the process does not see
 * that card, so the driver does not import the memory.
 */
static int ordinal_of(const struct share *share)
{
    if (share->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return 0;
    for (int i = 0; i < cu.device_count; i++)
        if (cu.devices[i].device == share->card)
            return i;
    return -1;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags)
{
    CU_TRY(cu_enter("cuMemExportToShareableHandle"));
    CU_CHECK(out != NULL && flags == 0 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    CUresult result = CUDA_ERROR_INVALID_VALUE; /* for an unknown handle, and for one that cannot be exported */
    cu_lock();
    struct physical *p = *find_physical(handle);
    if (p != NULL && p->file >= 0) {
        int fd = write_share(p) ? fcntl(p->file, F_DUPFD_CLOEXEC, 0) : -1;
        result = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
        if (fd >= 0) {
            *(int *)out = fd;
            cu_cannot_suspend(p->shared ? 0 : 1);
            p->shared = true;
        }
    }
    cu_unlock();
    return result;
}

/* Reads the last page of an exported file. Returns false if the descriptor is not such a file. */
static bool read_share(int fd, struct share *share)
{
    struct stat file;
    off_t at;
    if (fstat(fd, &file) != 0 || file.st_size < (off_t)sizeof(*share))
        return false;
    at = file.st_size - (off_t)sizeof(*share);
    return pread(fd, share, sizeof(*share), at) == sizeof(*share) && share->magic == SHARE_MAGIC &&
           share->size == (uint64_t)at;
}

bool cu_vmm_exported(int fd, uint64_t *size)
{
    struct share share;
    if (!read_share(fd, &share))
        return false;
    *size = share.size;
    return true;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, CUmemAllocationHandleType type)
{
    struct share share;
    CU_TRY(cu_enter("cuMemImportFromShareableHandle"));
    CU_CHECK(out != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(read_share((int)(intptr_t)handle, &share), CUDA_ERROR_INVALID_VALUE);
    int ordinal = ordinal_of(&share);
    CU_CHECK(ordinal >= 0, CUDA_ERROR_NOT_INITIALIZED);
    struct physical *p = calloc(1, sizeof(*p));
    CU_CHECK(p != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    p->file = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
    if (p->file < 0) {
        free(p);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    p->imported = p->shared = true;
    cu_lock();
    p->ordinal = ordinal;
    keep(p, &share.prop, share.size);
    cu_cannot_suspend(1);
    *out = p->id;
    cu_unlock();
    return CUDA_SUCCESS;
}

/*
 * admission.c: divides a tenant's limits among its processes. MPS limits each process separately, so two processes
 * would together get twice the share. Here each process takes a part, and a process is refused when no part is left.
 *
 * The parts are read locks on the file `limits` (fcntl(2): the lock ends with the process). Each process has one of
 * RECORDS records: a lock for its share, and one for its memory. The start of a lock names the record and the kind, its
 * length is the amount. So the tenant needs no file that it can write, and cannot fill the file system of the run
 * folder. A tenant that sets other locks harms only itself.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "guard.h"

#define SHARE "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#define MEMORY "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
#define PARTITION "CUDA_MPS_SM_PARTITION"

enum { RECORDS = 64 };
#define RECORD_BYTES ((off_t)1 << 34) /* two locks of at most UINT32_MAX bytes, with room between them */

struct part {
    uint32_t share_hundredths; /* share in hundredths of a percent */
    uint32_t memory_mib;
};

struct tenant {
    struct part whole;
    uint32_t processes;
    bool pooled_memory; /* libvgpu enforces one memory limit for all processes, so each process gets all of it here */
};

static int g_file = -1;

static off_t share_at(int index)
{
    return index * RECORD_BYTES;
}

static off_t memory_at(int index)
{
    return share_at(index) + RECORD_BYTES / 2;
}

static bool lock_amount(int file, off_t start, uint32_t amount)
{
    struct flock range = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = amount};
    int done;
    do
        done = fcntl(file, F_SETLK, &range);
    while (done != 0 && errno == EINTR);
    return done == 0;
}

/*
 * Returns the amount that other processes have taken at `start`: the length of their lock, or 0 if there is none. A lock
 * of another form, or one that cannot be read, counts as everything.
 */
static uint32_t locked_amount(int file, off_t start)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    if (fcntl(file, F_GETLK, &range) != 0)
        return UINT32_MAX;
    if (range.l_type == F_UNLCK)
        return 0;
    bool ours = range.l_start == start && range.l_len > 0 && range.l_len < UINT32_MAX;
    return ours ? (uint32_t)range.l_len : UINT32_MAX;
}

/*
 * Applies flock(2). LOCK_EX waits until no other process of the tenant is taking a part; LOCK_UN ends that. Returns
 * false on an error.
 */
static bool lock_admission(int file, int operation)
{
    int done;
    do
        done = flock(file, operation);
    while (done != 0 && errno == EINTR);
    return done == 0;
}

/* Computes what the other processes have left of `whole`. Returns the index of a free record, or -1. */
static int measure(int file, const struct tenant *tenant, struct part *left)
{
    int index = -1;
    *left = tenant->whole;
    for (int i = 0; i < RECORDS; i++) {
        uint32_t share = locked_amount(file, share_at(i));
        uint32_t memory = locked_amount(file, memory_at(i));
        if (share == 0 && memory == 0) {
            index = index < 0 ? i : index;
            continue;
        }
        left->share_hundredths -= share < left->share_hundredths ? share : left->share_hundredths;
        if (!tenant->pooled_memory)
            left->memory_mib -= memory < left->memory_mib ? memory : left->memory_mib;
    }
    return index;
}

/*
 * Returns the memory limit in MiB that the environment names for one device, such as "0=2048M" or "GPU-...=2G"; 0 for
 * any other text.
 */
static uint32_t asked_memory(void)
{
    const char *text = getenv(MEMORY);
    const char *value = text == NULL ? NULL : strchr(text, '=');
    char *end;
    if (value == NULL || strchr(value, ',') != NULL)
        return 0;
    unsigned long long number = strtoull(value + 1, &end, 10);
    if (strcasecmp(end, "G") == 0)
        number *= 1024;
    else if (strcasecmp(end, "M") != 0)
        return 0;
    return number > UINT32_MAX ? 0 : (uint32_t)number;
}

static uint32_t asked_share(void)
{
    const char *text = getenv(SHARE);
    char *end;
    double percent = text == NULL ? 0 : strtod(text, &end);
    return percent > 0 && percent <= 100 && *end == '\0' ? (uint32_t)(percent * 100 + 0.5) : 0;
}

/*
 * Returns the part that a process takes. By its environment it may request less than an equal part, or more, which it
 * gets if the tenant has that much left (take).
 */
static struct part wanted(const struct tenant *tenant)
{
    const struct part *whole = &tenant->whole;
    struct part part = {asked_share(), asked_memory()};
    if (part.share_hundredths == 0 || part.share_hundredths > whole->share_hundredths)
        part.share_hundredths = whole->share_hundredths / tenant->processes;
    if (part.memory_mib == 0 || part.memory_mib > whole->memory_mib)
        part.memory_mib = whole->memory_mib / (tenant->pooled_memory ? 1 : tenant->processes);
    return part;
}

static void set(const char *name, const char *value)
{
    const char *now = getenv(name);
    /* setenv is not safe beside other threads, so it is called only if the value changes */
    if (now == NULL || strcmp(now, value) != 0)
        setenv(name, value, 1);
}

static void set_environment(const struct part *part)
{
    char text[64];
    snprintf(text, sizeof(text), "%g", part->share_hundredths / 100.0);
    set(SHARE, text);
    snprintf(text, sizeof(text), "0=%uM", part->memory_mib);
    if (asked_memory() != part->memory_mib)
        set(MEMORY, text);
}

/* Reads the file `limits`, which vgpud writes: "HUNDREDTHS MIB PROCESSES POOLED" on one line. */
static bool read_limits(int file, struct tenant *tenant)
{
    struct part *whole = &tenant->whole;
    unsigned pooled = 0; /* the fourth value of the line: an older vgpud does not write it */
    char text[64];
    ssize_t length = pread(file, text, sizeof(text) - 1, 0);
    text[length > 0 ? length : 0] = '\0';
    bool good = sscanf(text, "%u %u %u %u", &whole->share_hundredths, &whole->memory_mib, &tenant->processes,
                       &pooled) >= 3 &&
                whole->share_hundredths > 0 && whole->memory_mib > 0 && tenant->processes > 0;
    tenant->pooled_memory = pooled != 0;
    return good;
}

static const char *tenant_folder(void)
{
    return access(GUARD_CONTAINER_TENANT, F_OK) == 0 ? GUARD_CONTAINER_TENANT : getenv("VGPU_MPS_TENANT");
}

static int take(int file, const struct tenant *tenant)
{
    struct part left, part = wanted(tenant);
    if (!lock_admission(file, LOCK_EX))
        return GUARD_NO_MORE_CLIENTS;
    int index = measure(file, tenant, &left);
    bool fits = index >= 0 && part.share_hundredths > 0 && part.memory_mib > 0 &&
                part.share_hundredths <= left.share_hundredths && part.memory_mib <= left.memory_mib;
    bool done = fits && lock_amount(file, share_at(index), part.share_hundredths) &&
                lock_amount(file, memory_at(index), part.memory_mib);
    lock_admission(file, LOCK_UN);
    if (done)
        set_environment(&part);
    return done ? GUARD_SUCCESS : GUARD_NO_MORE_CLIENTS;
}

/*
 * Names the tenant's static SM partition to the driver, if it has one. The file is read at each cuInit, because a
 * restarted control daemon gives new names.
 */
static void set_partition(const char *folder)
{
    char path[512], name[128];
    snprintf(path, sizeof(path), "%s/partition", folder);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    ssize_t length = read(file, name, sizeof(name) - 1);
    close(file);
    name[length > 0 ? length : 0] = '\0';
    name[strcspn(name, "\n")] = '\0';
    set(PARTITION, name);
}

int guard_admit(void)
{
    struct tenant tenant;
    char path[512];
    const char *folder = tenant_folder();
    if (folder == NULL)
        return GUARD_SUCCESS; /* without a tenant's folder, only the limits of MPS itself hold */
    snprintf(path, sizeof(path), "%s/limits", folder);
    guard_leave();
    g_file = open(path, O_RDONLY | O_CLOEXEC);
    if (g_file < 0 || !read_limits(g_file, &tenant))
        /* the allocation was released, or belongs to another tenant: a process without limits is refused */
        return GUARD_NO_CONNECTION;
    int result = take(g_file, &tenant);
    if (result == GUARD_SUCCESS)
        set_partition(folder);
    else
        guard_leave();
    return result;
}

void guard_leave(void)
{
    if (g_file >= 0)
        close(g_file);
    g_file = -1;
}

/*
 * admission.c: divides a tenant's limits among its processes. MPS limits each process separately, so two processes
 * would together get twice the share. Here each process takes a part, and a process is refused when no part is left.
 *
 * The parts are records in a file of the tenant, each locked by its process (fcntl(2): the lock ends with the process).
 * A tenant that changes the file harms only itself.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guard.h"

#define SHARE "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#define MEMORY "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

enum { RECORDS = 64, ADMISSION_AT = 4096 };

struct part {
    uint32_t share_hundredths; /* share in hundredths of a percent */
    uint32_t memory_mib;
};

struct tenant {
    struct part whole;
    uint32_t processes;
    bool pooled_memory; /* libvgpu enforces one limit for all processes, so none takes a part of it here */
};

static int g_file = -1;

static bool lock_range(int file, short type, off_t start, off_t length)
{
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    int done;
    do
        done = fcntl(file, start == ADMISSION_AT ? F_SETLKW : F_SETLK, &range);
    while (done != 0 && errno == EINTR);
    return done == 0;
}

static bool record_held(int file, int index)
{
    struct flock range = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = index * (off_t)sizeof(struct part), .l_len = 1};
    return fcntl(file, F_GETLK, &range) != 0 || range.l_type != F_UNLCK;
}

/* Computes what the other processes have left of `whole`. Returns the index of a free record, or -1. */
static int measure(int file, const struct tenant *tenant, struct part *left)
{
    const struct part *whole = &tenant->whole;
    int index = -1;
    *left = *whole;
    for (int i = 0; i < RECORDS; i++) {
        struct part taken = {0, 0};
        if (!record_held(file, i)) {
            index = index < 0 ? i : index;
            continue;
        }
        if (pread(file, &taken, sizeof(taken), i * (off_t)sizeof(taken)) != (ssize_t)sizeof(taken))
            taken = *whole;
        left->share_hundredths -= taken.share_hundredths < left->share_hundredths ? taken.share_hundredths
                                                                                  : left->share_hundredths;
        if (!tenant->pooled_memory)
            left->memory_mib -= taken.memory_mib < left->memory_mib ? taken.memory_mib : left->memory_mib;
    }
    return index;
}

/* Parses a memory limit such as "0=2048M" or "GPU-...=2G", for one device. Returns 0 for any other text. */
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
 * Returns the part that a process takes. It may request less than its even part, or more as long as the tenant has that
 * much left.
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
static bool read_limits(const char *folder, struct tenant *tenant)
{
    struct part *whole = &tenant->whole;
    unsigned pooled = 0; /* the value is missing in files of an older vgpud */
    char path[512];
    snprintf(path, sizeof(path), "%s/limits", folder);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    bool good = fscanf(file, "%u %u %u %u", &whole->share_hundredths, &whole->memory_mib, &tenant->processes,
                       &pooled) >= 3 &&
                whole->share_hundredths > 0 && whole->memory_mib > 0 && tenant->processes > 0;
    tenant->pooled_memory = pooled != 0;
    fclose(file);
    return good;
}

static const char *tenant_folder(void)
{
    return access(GUARD_CONTAINER_TENANT, F_OK) == 0 ? GUARD_CONTAINER_TENANT : getenv("VGPU_MPS_TENANT");
}

static int take(int file, const struct tenant *tenant)
{
    struct part left, part = wanted(tenant);
    if (!lock_range(file, F_WRLCK, ADMISSION_AT, 1))
        return GUARD_NO_MORE_CLIENTS;
    int index = measure(file, tenant, &left);
    bool fits = index >= 0 && part.share_hundredths > 0 && part.memory_mib > 0 &&
                part.share_hundredths <= left.share_hundredths && part.memory_mib <= left.memory_mib;
    off_t at = index * (off_t)sizeof(part);
    bool done = fits && lock_range(file, F_WRLCK, at, sizeof(part)) &&
                pwrite(file, &part, sizeof(part), at) == (ssize_t)sizeof(part);
    lock_range(file, F_UNLCK, ADMISSION_AT, 1);
    if (done)
        set_environment(&part);
    return done ? GUARD_SUCCESS : GUARD_NO_MORE_CLIENTS;
}

int guard_admit(void)
{
    struct tenant tenant;
    char path[512];
    const char *folder = tenant_folder();
    if (folder == NULL)
        return GUARD_SUCCESS; /* without the file, only the limits of MPS itself hold */
    snprintf(path, sizeof(path), "%s/slots", folder);
    guard_leave();
    if (!read_limits(folder, &tenant) || (g_file = open(path, O_RDWR | O_CLOEXEC)) < 0)
        /* the allocation was released, or belongs to another tenant: a process without limits is refused */
        return GUARD_NO_CONNECTION;
    int result = take(g_file, &tenant);
    if (result != GUARD_SUCCESS)
        guard_leave();
    return result;
}

void guard_leave(void)
{
    if (g_file >= 0)
        close(g_file);
    g_file = -1;
}

#include "hami_limits.h"

#include <string.h>

#define MEMORY "CUDA_DEVICE_MEMORY_LIMIT"
#define SHARE "CUDA_DEVICE_SM_LIMIT"
#define POLICY "GPU_CORE_UTILIZATION_POLICY="
#define BYTES_MAX ((uint64_t)1 << 50) /* no card has a pebibyte: larger values are mistakes */
#define NO_INDEX (-1)
#define BAD_INDEX (-2)

/* Parses a decimal integer at `text`. Returns the end of the number, or NULL if there is none or it exceeds `most`. */
static const char *number(const char *text, uint64_t most, uint64_t *value)
{
    if (*text < '0' || *text > '9')
        return NULL;
    for (*value = 0; *text >= '0' && *text <= '9'; text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        if (*value > (most - digit) / 10)
            return NULL;
        *value = *value * 10 + digit;
    }
    return text;
}

static bool parse_bytes(const char *text, uint64_t *bytes)
{
    static const char units[] = "kmg";
    uint64_t unit = 1;
    text = number(text, BYTES_MAX, bytes);
    if (text == NULL)
        return false;
    if (*text != '\0') {
        char lower = (char)(*text | 0x20);
        const char *found = memchr(units, lower, sizeof(units) - 1);
        if (found == NULL || text[1] != '\0')
            return false;
        unit = (uint64_t)1 << 10 * (found - units + 1);
    }
    if (*bytes == 0 || *bytes > BYTES_MAX / unit)
        return false;
    *bytes *= unit;
    return true;
}

static bool parse_share(const char *text, uint32_t *hundredths)
{
    uint64_t percent;
    const char *end = number(text, 100, &percent);
    if (end == NULL || *end != '\0')
        return false;
    *hundredths = percent == 100 ? 0 : (uint32_t)percent * 100;
    return true;
}

/*
 * Returns the value of `entry` if it is the variable `name`, or `name` and a device; otherwise NULL. *index: the
 * device's number, NO_INDEX or BAD_INDEX.
 */
static const char *value_of(const char *entry, const char *name, int *index)
{
    uint64_t device;
    size_t length = strlen(name);
    if (strncmp(entry, name, length) != 0)
        return NULL;
    entry += length;
    *index = NO_INDEX;
    if (*entry == '=')
        return entry + 1;
    if (*entry++ != '_')
        return NULL;
    const char *end = number(entry, VGPU_MAX_DEVICES - 1, &device);
    *index = end != NULL && *end == '=' ? (int)device : BAD_INDEX;
    end = strchr(entry, '=');
    return end != NULL ? end + 1 : NULL;
}

bool vgpu_hami_asked(char *const *environment)
{
    int index;
    for (; environment != NULL && *environment != NULL; environment++)
        if (value_of(*environment, MEMORY, &index) != NULL || value_of(*environment, SHARE, &index) != NULL)
            return true;
    return false;
}

struct figures {
    uint64_t memory_all;
    uint32_t share_all;
    bool share_own[VGPU_MAX_DEVICES]; /* a value for this device was set, possibly "no limit" */
    bool no_shares;
};

static bool take(const char *entry, struct vgpu_hami_limits *limits, struct figures *figures)
{
    int index;
    uint64_t bytes;
    uint32_t share;
    const char *value = value_of(entry, MEMORY, &index);
    if (value != NULL) {
        if (index == BAD_INDEX || !parse_bytes(value, &bytes))
            return false;
        *(index >= 0 ? &limits->memory_bytes[index] : &figures->memory_all) = bytes;
        return true;
    }
    value = value_of(entry, SHARE, &index);
    if (value != NULL) {
        if (index == BAD_INDEX || !parse_share(value, &share))
            return false;
        *(index >= 0 ? &limits->share[index] : &figures->share_all) = share;
        if (index >= 0)
            figures->share_own[index] = true;
        return true;
    }
    if (strncmp(entry, POLICY, sizeof(POLICY) - 1) == 0) {
        value = entry + sizeof(POLICY) - 1;
        figures->no_shares = strcmp(value, "DISABLE") == 0 || strcmp(value, "disable") == 0;
        return figures->no_shares || strcmp(value, "DEFAULT") == 0 || strcmp(value, "default") == 0 ||
               strcmp(value, "FORCE") == 0 || strcmp(value, "force") == 0;
    }
    return true;
}

const char *vgpu_hami_read(char *const *environment, struct vgpu_hami_limits *limits)
{
    struct figures figures = {0};
    memset(limits, 0, sizeof(*limits));
    for (; environment != NULL && *environment != NULL; environment++)
        if (!take(*environment, limits, &figures))
            return *environment;
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++) {
        if (limits->memory_bytes[d] == 0)
            limits->memory_bytes[d] = figures.memory_all;
        if (!figures.share_own[d])
            limits->share[d] = figures.share_all;
        if (figures.no_shares)
            limits->share[d] = 0;
    }
    return NULL;
}

#include "lease_limits.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "pause.h"

#define READ_TRIES 100        /* maximum of attempts to read the page: some 7 ms if CPUs are idle */
#define WRITER_STEP_NS 20000L /* pause between attempts; vgpud writes a page by three system calls */

_Static_assert(sizeof(struct vgpu_limits) % sizeof(uint64_t) == 0, "copied by words");

/*
 * Copies the page word by word with acquire loads. So the second read of generation cannot move before them, and no
 * plain load reads the page while vgpud writes it.
 */
static void copy_words(const struct vgpu_limits *shared, struct vgpu_limits *copy)
{
    const uint64_t *from = (const uint64_t *)shared;
    uint64_t words[sizeof(*copy) / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        words[i] = __atomic_load_n(&from[i], __ATOMIC_ACQUIRE);
    memcpy(copy, words, sizeof(*copy));
}

static bool terminated(const char *text, size_t size)
{
    return text[0] != '\0' && memchr(text, '\0', size) != NULL;
}

static bool device_valid(const struct vgpu_device_limits *device)
{
    unsigned char uuid[16];
    return terminated(device->uuid, sizeof(device->uuid)) && vgpu_uuid_parse(device->uuid, uuid) == 0 &&
           device->memory_bytes > 0 && device->memory_bytes <= INT64_MAX && device->share >= 1 &&
           device->share <= VGPU_SHARE_ALL && device->share_policy <= VGPU_SHARE_WORK_CONSERVING;
}

static bool limits_valid(const struct vgpu_limits *limits)
{
    if (limits->magic != VGPU_LEASE_MAGIC || limits->version != VGPU_LEASE_VERSION)
        return false;
    if (!terminated(limits->allocation, sizeof(limits->allocation)))
        return false;
    if (limits->state < VGPU_LEASE_OPEN || limits->state > VGPU_LEASE_SUSPENDED)
        return false;
    if (limits->device_count == 0 || limits->device_count > VGPU_MAX_DEVICES)
        return false;
    for (uint32_t i = 0; i < limits->device_count; i++)
        if (!device_valid(&limits->devices[i]))
            return false;
    return true;
}

int vgpu_limits_read(const struct vgpu_limits *shared, struct vgpu_limits *copy)
{
    struct vgpu_limits body;
    for (int attempt = 0; attempt < READ_TRIES; attempt++) {
        uint64_t before = vgpu_limits_generation(shared);
        if ((before & 1) == 0) {
            copy_words(shared, &body);
            if (vgpu_limits_generation(shared) == before) {
                if (!limits_valid(&body))
                    return -EINVAL;
                *copy = body;
                return 0;
            }
        }
        vgpu_pause_ns(WRITER_STEP_NS);
    }
    return -EAGAIN;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int vgpu_uuid_parse(const char *text, unsigned char bytes[16])
{
    if (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0)
        return -EINVAL;
    text += 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            if (*text++ != '-')
                return -EINVAL;
        int high = hex_digit(text[0]);
        int low = high < 0 ? -1 : hex_digit(text[1]);
        if (low < 0)
            return -EINVAL;
        bytes[i] = (unsigned char)(high << 4 | low);
        text += 2;
    }
    return *text == '\0' ? 0 : -EINVAL;
}

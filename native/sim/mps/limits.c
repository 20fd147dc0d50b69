#include "mps.h"

#include <stdlib.h>
#include <string.h>

void limits_init(struct limits *l)
{
    memset(l, 0, sizeof(*l));
    l->thread_percentage = 100.0;
}

/*
 * Sets the thread percentage. A value that is not above 0, or is above 100, keeps the old value, and so does text that
 * does not begin with a number; no error is printed (measured).
 */
void limits_set_percentage(struct limits *l, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end != text && value > 0 && value <= 100)
        l->thread_percentage = value;
}

/*
 * Parses a memory limit as NVIDIA's daemon does. Measured on 550: "1.5G" is 1 MiB, and "-1M" wraps. A number without a
 * letter, or with another letter than G (even K), is in MiB. The daemon refuses nothing.
 */
static uint64_t parse_bytes(const char *text)
{
    char *end;
    long long n = strtoll(text, &end, 10);
    return (uint64_t)n << (*end == 'G' || *end == 'g' ? 30 : 20);
}

void limits_set_memory(struct limits *l, const char *device, const char *text)
{
    uint32_t i = 0;
    while (i < l->count && strcmp(l->memory[i].device, device) != 0)
        i++;
    if (i == MPS_MAX_LIMITS)
        return;
    if (i == l->count)
        l->count++;
    snprintf(l->memory[i].device, sizeof(l->memory[i].device), "%s", device);
    l->memory[i].bytes = parse_bytes(text);
}

/* Prints a limit in whole GiB, rounded down, from 1 GiB up; otherwise in whole MiB (measured). */
void limits_print_memory(const struct limits *l, const char *device, char *out, size_t size)
{
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t mib = l->memory[i].bytes >> 20;
        if (strcmp(l->memory[i].device, device) != 0 || mib == 0) /* unlimited: prints nothing */
            continue;
        if (mib >= 1024)
            snprintf(out, size, "%lluG\n", (unsigned long long)(mib >> 10));
        else
            snprintf(out, size, "%lluM\n", (unsigned long long)mib);
    }
}

/* Returns the UUID of the card with that index or UUID prefix, or NULL; an instance's name is returned as it is. */
static const char *uuid_of(const struct sim_state *s, const char *word)
{
    unsigned long long index;
    if (strncmp(word, "MIG-", 4) == 0)
        return word;
    if (sim_parse_unsigned(word, &index))
        return index < s->device_count ? s->devices[index].uuid : NULL;
    for (uint32_t i = 0; i < s->device_count; i++)
        if (strncmp(s->devices[i].uuid, word, strlen(word)) == 0)
            return s->devices[i].uuid;
    return NULL;
}

/* Copies to `out` the UUID of the device that the daemon's CUDA_VISIBLE_DEVICES makes number `ordinal`. */
static bool visible_uuid(const struct sim_state *s, unsigned long long ordinal, char *out, size_t size)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES"), *uuid = NULL;
    char text[2048];
    if (list == NULL) {
        uuid = ordinal < s->device_count ? s->devices[ordinal].uuid : NULL;
    } else {
        snprintf(text, sizeof(text), "%s", list);
        char *rest = text, *word = NULL;
        for (unsigned long long i = 0; i <= ordinal; i++)
            if ((word = strsep(&rest, ",")) == NULL)
                return false;
        uuid = uuid_of(s, word);
    }
    return uuid != NULL && snprintf(out, size, "%s", uuid) < (int)size;
}

void limits_devices(const struct sim_state *s, char *out, size_t size)
{
    size_t used = 0;
    char uuid[96];
    bool all = getenv("CUDA_VISIBLE_DEVICES") == NULL;
    snprintf(out, size, all ? "*" : "");
    for (unsigned long long i = 0; !all && visible_uuid(s, i, uuid, sizeof(uuid)); i++) {
        int n = snprintf(out + used, size - used, "%s%s", used > 0 ? "," : "", uuid);
        if (n < 0 || (size_t)n >= size - used)
            break;
        used += (size_t)n;
    }
    if (out[0] == '\0')
        snprintf(out, size, "-");
}

void limits_for_client(const struct limits *l, const struct sim_state *s, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        unsigned long long ordinal;
        char uuid[96];
        snprintf(uuid, sizeof(uuid), "%s", l->memory[i].device);
        if (l->memory[i].bytes == 0 ||
            (sim_parse_unsigned(uuid, &ordinal) && !visible_uuid(s, ordinal, uuid, sizeof(uuid))))
            continue;
        int n = snprintf(out + used, size - used, "%s%s=%llu", used > 0 ? "," : "", uuid,
                         (unsigned long long)l->memory[i].bytes);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}

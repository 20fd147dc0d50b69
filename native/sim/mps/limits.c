#include "mps.h"

#include <stdlib.h>
#include <string.h>

void limits_init(struct limits *l)
{
    memset(l, 0, sizeof(*l));
    l->thread_percentage = 100.0;
}

/* 0, above 100 and what is no number keep the old value, without a word (measured). */
void limits_set_percentage(struct limits *l, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end != text && value > 0 && value <= 100)
        l->thread_percentage = value;
}

/* Measured on 550: "1.5G" is 1 MiB, "-1M" wraps, a bare number is bytes; nothing is refused. */
static uint64_t parse_bytes(const char *text)
{
    char *end;
    long long n = strtoll(text, &end, 10);
    switch (*end) {
    case '.':
        return (uint64_t)n << 20;
    case 'K':
    case 'k':
        return (uint64_t)n << 10;
    case 'M':
    case 'm':
        return (uint64_t)n << 20;
    case 'G':
    case 'g':
        return (uint64_t)n << 30;
    default:
        return (uint64_t)n;
    }
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

/* Whole GiB, floored, from 1 GiB up; else whole MiB (measured). */
void limits_print_memory(const struct limits *l, const char *device, char *out, size_t size)
{
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t mib = l->memory[i].bytes >> 20;
        if (strcmp(l->memory[i].device, device) != 0)
            continue;
        if (mib >= 1024)
            snprintf(out, size, "%lluG\n", (unsigned long long)(mib >> 10));
        else
            snprintf(out, size, "%lluM\n", (unsigned long long)mib);
    }
}

/* The card that the daemon's CUDA_VISIBLE_DEVICES makes number `ordinal`. */
static const char *visible_uuid(const struct sim_state *s, unsigned long long ordinal)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char text[2048];
    if (list == NULL)
        return ordinal < s->device_count ? s->devices[ordinal].uuid : NULL;
    snprintf(text, sizeof(text), "%s", list);
    char *rest = text, *word = NULL;
    for (unsigned long long i = 0; i <= ordinal; i++)
        if ((word = strsep(&rest, ",")) == NULL)
            return NULL;
    unsigned long long index;
    if (sim_parse_unsigned(word, &index))
        return index < s->device_count ? s->devices[index].uuid : NULL;
    for (uint32_t i = 0; i < s->device_count; i++)
        if (strncmp(s->devices[i].uuid, word, strlen(word)) == 0)
            return s->devices[i].uuid;
    return NULL;
}

void limits_for_client(const struct limits *l, const struct sim_state *s, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        unsigned long long ordinal;
        const char *uuid = l->memory[i].device;
        if (sim_parse_unsigned(uuid, &ordinal))
            uuid = visible_uuid(s, ordinal);
        if (uuid == NULL || l->memory[i].bytes == 0)
            continue;
        int n = snprintf(out + used, size - used, "%s%s=%llu", used > 0 ? "," : "", uuid,
                         (unsigned long long)l->memory[i].bytes);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
}

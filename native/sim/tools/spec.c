#include "spec.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "../state/fields.h"

enum kind { KIND_U, KIND_L, KIND_D, KIND_T };

struct field {
    const char *name;
    enum kind kind;
    size_t offset, size;
};

#define ENTRY(type, kind, field) {#field, kind, offsetof(struct type, field), sizeof(((struct type *)0)->field)},
#define DEVICE_U(f) ENTRY(sim_device, KIND_U, f)
#define DEVICE_L(f) ENTRY(sim_device, KIND_L, f)
#define DEVICE_D(f) ENTRY(sim_device, KIND_D, f)
#define DEVICE_T(f) ENTRY(sim_device, KIND_T, f)
#define GI_U(f) ENTRY(sim_gi_profile, KIND_U, f)
#define GI_L(f) ENTRY(sim_gi_profile, KIND_L, f)
#define GI_D(f) ENTRY(sim_gi_profile, KIND_D, f)
#define GI_T(f) ENTRY(sim_gi_profile, KIND_T, f)
#define NODE_U(f) ENTRY(sim_state, KIND_U, f)
#define NODE_T(f) ENTRY(sim_state, KIND_T, f)

static const struct field device_fields[] = {SIM_DEVICE_FIELDS(DEVICE_U, DEVICE_L, DEVICE_D, DEVICE_T){0}};
static const struct field gi_fields[] = {SIM_GI_FIELDS(GI_U, GI_L, GI_D, GI_T){0}};
static const struct field node_fields[] = {NODE_T(profile) NODE_T(driver_version) NODE_T(nvml_version)
                                               NODE_U(cuda_version) NODE_U(device_count) NODE_U(caps_minor_base){0}};

static bool set_field(void *base, const struct field *fields, const char *name, const char *value)
{
    unsigned long long number = 0;
    while (fields->name != NULL && strcmp(fields->name, name) != 0)
        fields++;
    if (fields->name == NULL)
        return false;
    char *at = (char *)base + fields->offset, *end;
    switch (fields->kind) {
    case KIND_U:
        if (!sim_parse_unsigned(value, &number) || number > UINT32_MAX)
            return false;
        *(uint32_t *)(void *)at = (uint32_t)number;
        return true;
    case KIND_L:
        if (!sim_parse_unsigned(value, &number))
            return false;
        *(uint64_t *)(void *)at = number;
        return true;
    case KIND_D:
        *(double *)(void *)at = strtod(value, &end);
        return *value != '\0' && *end == '\0';
    case KIND_T:
        break;
    }
    return snprintf(at, fields->size, "%s", value) < (int)fields->size;
}

static bool set_placements(struct sim_gi_profile *p, const char *value)
{
    while (*value != '\0') {
        unsigned start, size;
        int used = 0;
        if (p->placement_count == SIM_MAX_PLACEMENTS || sscanf(value, "%u:%u%n", &start, &size, &used) != 2)
            return false;
        p->placements[p->placement_count++] = (struct sim_placement){start, size};
        value += used;
        if (*value == ',')
            value++;
    }
    return true;
}

static bool set_gi(struct sim_device *d, unsigned index, const char *name, const char *value)
{
    if (index >= SIM_MAX_GI_PROFILES)
        return false;
    struct sim_gi_profile *p = &d->gi_profiles[index];
    if (index >= d->gi_profile_count)
        d->gi_profile_count = index + 1;
    p->used = 1;
    return strcmp(name, "placements") == 0 ? set_placements(p, value) : set_field(p, gi_fields, name, value);
}

static bool set_line(struct sim_state *s, const char *key, const char *value)
{
    unsigned a, b;
    unsigned long long number;
    int used = 0;
    if (sscanf(key, "device.%u.gi.%u.%n", &a, &b, &used) == 2 && used > 0)
        return a < SIM_MAX_DEVICES && set_gi(&s->devices[a], b, key + used, value);
    used = 0;
    if (sscanf(key, "device.%u.%n", &a, &used) == 1 && used > 0)
        return a < SIM_MAX_DEVICES && set_field(&s->devices[a], device_fields, key + used, value);
    bool link = sscanf(key, "link.%u.%u", &a, &b) == 2;
    if (link || sscanf(key, "topology.%u.%u", &a, &b) == 2) {
        if (a >= SIM_MAX_DEVICES || b >= SIM_MAX_DEVICES || !sim_parse_unsigned(value, &number) || number > UINT8_MAX)
            return false;
        (link ? s->links : s->topology)[a][b] = (uint8_t)number;
        return true;
    }
    return set_field(s, node_fields, key, value);
}

unsigned sim_spec_read(struct sim_state *s, FILE *in)
{
    char line[1024];
    for (unsigned number = 1; fgets(line, sizeof(line), in) != NULL; number++) {
        line[strcspn(line, "\n")] = '\0';
        char *value = strchr(line, '=');
        if (value == NULL)
            return number;
        *value++ = '\0';
        if (!set_line(s, line, value) || s->device_count > SIM_MAX_DEVICES)
            return number;
    }
    return 0;
}

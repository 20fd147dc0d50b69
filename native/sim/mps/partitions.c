/*
 * Static SM partitions (`-S`, branch 590 and later). The commands and the variable are from NVIDIA's MPS guide, "Legacy
 * MPS v2 Interface". The words of the replies and the columns of `lspart` are as public scripts for CUDA 13.1 read
 * them. Assumed: a partition's id is valid until its daemon ends. This daemon partitions its first device only.
 */
#include <stdlib.h>
#include <string.h>

#include "mps.h"

enum { HOPPER = 9, CHUNK_SMS = 8, CHUNK_SMS_BEFORE_HOPPER = 4 };

static const struct sim_device *device_of(const struct daemon *d)
{
    char devices[1024];
    limits_devices(d->state, devices, sizeof(devices));
    devices[strcspn(devices, ",")] = '\0';
    for (uint32_t i = 0; i < d->state->device_count; i++)
        if (devices[0] == '*' || strcmp(d->state->devices[i].uuid, devices) == 0)
            return &d->state->devices[i];
    return NULL;
}

static uint32_t chunk_sms(const struct sim_device *device)
{
    return device->cc_major >= HOPPER ? CHUNK_SMS : CHUNK_SMS_BEFORE_HOPPER;
}

static uint32_t used_chunks(const struct daemon *d)
{
    uint32_t used = 0;
    for (int i = 0; i < MPS_MAX_PARTITIONS; i++)
        used += d->partitions[i].chunks;
    return used;
}

static struct partition *find(struct daemon *d, const char *id)
{
    for (int i = 0; i < MPS_MAX_PARTITIONS; i++)
        if (d->partitions[i].chunks > 0 && strcmp(d->partitions[i].id, id) == 0)
            return &d->partitions[i];
    return NULL;
}

static bool has_clients(const struct daemon *d, const struct partition *p)
{
    for (int i = 0; i < MPS_MAX_CONNECTIONS; i++)
        if (d->connections[i].peer == PEER_CLIENT && d->connections[i].partition == p)
            return true;
    return false;
}

void partitions_add(struct daemon *d, const char *uuid, uint32_t chunks, char *out, size_t size)
{
    const struct sim_device *device = device_of(d);
    struct partition *p = NULL;
    for (int i = 0; i < MPS_MAX_PARTITIONS && p == NULL; i++)
        p = d->partitions[i].chunks == 0 ? &d->partitions[i] : NULL;
    if (device == NULL || p == NULL || chunks == 0 || strcmp(device->uuid, uuid) != 0 ||
        used_chunks(d) + chunks > device->sm_count / chunk_sms(device)) {
        snprintf(out, size,
                 "Failed to fulfill the requested SM partition of %u chunks, error "
                 "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION\n",
                 chunks);
        return;
    }
    *p = (struct partition){.chunks = chunks};
    snprintf(p->id, sizeof(p->id), "Dx%04uAAAA", ++d->partitions_made);
    snprintf(out, size, "Partition %s/%s created\n", uuid, p->id);
}

void partitions_remove(struct daemon *d, const char *id, char *out, size_t size)
{
    struct partition *p = find(d, id);
    out[0] = '\0';
    if (p == NULL)
        snprintf(out, size, "Partition %s not found\n", id);
    else if (has_clients(d, p))
        snprintf(out, size, "Failed to remove partition %s: it is in use\n", id);
    else
        memset(p, 0, sizeof(*p));
}

void partitions_print(const struct daemon *d, char *out, size_t size)
{
    const struct sim_device *device = device_of(d);
    if (device == NULL)
        return;
    uint32_t sms = chunk_sms(device), all = device->sm_count / sms, used = used_chunks(d);
    int n = snprintf(out, size,
                     "GPU           Partition       free   used   free   used   clients\n"
                     "                              chunk  chunk  SM     SM\n"
                     "%.12s  -               %-6u %-6u %-6u %-6u -\n",
                     device->uuid, all - used, used, device->sm_count - used * sms, used * sms);
    for (int i = 0; i < MPS_MAX_PARTITIONS && n > 0 && (size_t)n < size; i++) {
        const struct partition *p = &d->partitions[i];
        if (p->chunks > 0)
            n += snprintf(out + n, size - (size_t)n, "%.12s  %-15s -      %-6u -      %-6u %s\n", device->uuid, p->id,
                          p->chunks, p->chunks * sms, has_clients(d, p) ? "Yes" : "No");
    }
}

double partitions_percent(struct daemon *d, struct connection *c, const char *named)
{
    const struct sim_device *device = device_of(d);
    const char *id = strchr(named, '/');
    c->partition = device == NULL || id == NULL ? NULL : find(d, id + 1);
    return c->partition == NULL ? 0 : 100.0 * c->partition->chunks * chunk_sms(device) / device->sm_count;
}

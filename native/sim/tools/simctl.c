/* vgpu-simctl: the one program that makes and changes a state file from outside. vgpu-sim drives it.
 *
 *   vgpu-simctl STATE create < SPEC          vgpu-simctl STATE dump
 *   vgpu-simctl STATE reboot                 vgpu-simctl STATE reset DEVICE
 *   vgpu-simctl STATE fault FUNCTION error|missing|hang|slow CODE-OR-US COUNT DEVICE   (-1: for ever, all)
 *   vgpu-simctl STATE clear-faults [DEVICE]  vgpu-simctl STATE lost DEVICE 0|1
 *   vgpu-simctl STATE hide DEVICE BYTES      vgpu-simctl STATE xid DEVICE CODE
 *   vgpu-simctl STATE driver VERSION         vgpu-simctl STATE recovery DEVICE ACTION
 *   vgpu-simctl STATE rows-pending|rows-failed|banks-pending DEVICE COUNT
 */
#include <errno.h>
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../state/state.h"
#include "dump.h"
#include "spec.h"

static int usage(void)
{
    fprintf(stderr, "vgpu-simctl: bad arguments; drive it through vgpu-sim\n");
    return 2;
}

static int create(const char *path)
{
    char temporary[4096];
    snprintf(temporary, sizeof(temporary), "%s", path);
    struct sim_state *s = sim_create_path(temporary);
    if (s == NULL) {
        fprintf(stderr, "vgpu-simctl: cannot create %s: %s\n", path, strerror(errno));
        return 1;
    }
    unsigned bad = sim_spec_read(s, stdin);
    if (bad != 0) {
        fprintf(stderr, "vgpu-simctl: line %u of the description is not understood\n", bad);
        unlink(path);
        return 2;
    }
    sim_tree_write(s);
    __atomic_store_n(&s->magic, SIM_MAGIC, __ATOMIC_RELEASE); /* stored last: the magic number makes the state valid */
    return 0;
}

static bool device_index(struct sim_state *s, const char *text, uint32_t *device)
{
    unsigned long long n;
    if (!sim_parse_unsigned(text, &n) || n >= s->device_count) {
        fprintf(stderr, "vgpu-simctl: no device %s; the node has %u\n", text, s->device_count);
        return false;
    }
    *device = (uint32_t)n;
    return true;
}

static int add_fault(struct sim_state *s, char **argv)
{
    struct sim_fault f = {.used = 1, .remaining = atoi(argv[3])};
    snprintf(f.function, sizeof(f.function), "%s", argv[0]);
    f.device_plus_one = (uint32_t)(atoi(argv[4]) + 1);
    f.action = strcmp(argv[1], "hang") == 0      ? SIM_FAULT_HANG
               : strcmp(argv[1], "slow") == 0    ? SIM_FAULT_SLOW
               : strcmp(argv[1], "missing") == 0 ? SIM_FAULT_MISSING
                                                 : SIM_FAULT_ERROR;
    bool answers = f.action == SIM_FAULT_ERROR || f.action == SIM_FAULT_MISSING;
    f.code = answers ? (uint32_t)atoi(argv[2]) : 0;
    f.delay_us = f.action == SIM_FAULT_SLOW ? (uint32_t)atoi(argv[2]) : 0;
    for (uint32_t i = 0; i < SIM_MAX_FAULTS; i++) {
        if (s->faults[i].used)
            continue;
        s->faults[i] = f;
        atomic_fetch_add(&s->fault_count, 1);
        return 0;
    }
    fprintf(stderr, "vgpu-simctl: all %d fault entries are taken\n", SIM_MAX_FAULTS);
    return 1;
}

static int change_device(struct sim_state *s, const char *verb, int argc, char **argv)
{
    uint32_t device;
    unsigned long long value = 0;
    if (argc < 1 || !device_index(s, argv[0], &device))
        return 2;
    struct sim_device *d = &s->devices[device];
    if (strcmp(verb, "reset") == 0) {
        if (sim_in_use(s, device, SIM_NONE, SIM_NONE)) {
            fprintf(stderr, "vgpu-simctl: device %u is in use by a process\n", device);
            return 1;
        }
        sim_device_reset(s, device);
        return 0;
    }
    if (argc < 2 || !sim_parse_unsigned(argv[1], &value))
        return usage();
    if (strcmp(verb, "lost") == 0) {
        d->lost = value != 0;
        if (value != 0)
            sim_post_event(s, device, SIM_NONE, SIM_NONE, nvmlEventTypeXidCriticalError, 79);
    } else if (strcmp(verb, "recovery") == 0) {
        if (d->recovery_action != (uint32_t)value)
            sim_post_event(s, device, SIM_NONE, SIM_NONE, nvmlEventTypeGpuRecoveryAction, value);
        d->recovery_action = (uint32_t)value;
    } else if (strcmp(verb, "rows-pending") == 0) {
        d->rows_pending = (uint32_t)value;
    } else if (strcmp(verb, "rows-failed") == 0) {
        d->rows_failed = (uint32_t)value;
    } else if (strcmp(verb, "banks-pending") == 0) {
        d->banks_pending = (uint32_t)value;
    } else if (strcmp(verb, "hide") == 0) {
        d->hidden_bytes = value;
    } else if (strcmp(verb, "xid") == 0) {
        sim_post_event(s, device, SIM_NONE, SIM_NONE, nvmlEventTypeXidCriticalError, value);
    } else {
        return usage();
    }
    return 0;
}

/* Clears the faults of calls: those of one device, or all if device_plus_one is 0. */
static void clear_faults(struct sim_state *s, uint32_t device_plus_one)
{
    for (uint32_t i = 0; i < SIM_MAX_FAULTS; i++) {
        struct sim_fault *f = &s->faults[i];
        if (!f->used || (device_plus_one != 0 && f->device_plus_one != device_plus_one))
            continue;
        memset(f, 0, sizeof(*f));
        atomic_fetch_sub(&s->fault_count, 1);
    }
}

static int change(struct sim_state *s, int argc, char **argv)
{
    const char *verb = argv[0];
    if (strcmp(verb, "fault") == 0)
        return argc == 6 ? add_fault(s, argv + 1) : usage();
    if (strcmp(verb, "clear-faults") == 0) {
        clear_faults(s, argc > 1 ? (uint32_t)atoi(argv[1]) + 1 : 0);
        return 0;
    }
    if (strcmp(verb, "reboot") == 0) {
        sim_reboot(s);
        return 0;
    }
    if (strcmp(verb, "driver") == 0 && argc == 2) {
        snprintf(s->driver_version, sizeof(s->driver_version), "%s", argv[1]);
        sim_tree_write(s);
        return 0;
    }
    return change_device(s, verb, argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
    if (argc < 3 || argv[1][0] != '/')
        return usage();
    if (strcmp(argv[2], "create") == 0)
        return create(argv[1]);
    struct sim_state *s = sim_attach_path(argv[1]);
    if (s == NULL) {
        fprintf(stderr, "vgpu-simctl: %s is no state file of this version: %s\n", argv[1], strerror(errno));
        return 1;
    }
    if (strcmp(argv[2], "dump") == 0) {
        sim_dump(s);
        return 0;
    }
    sim_lock(s);
    int rc = change(s, argc - 2, argv + 2);
    sim_unlock(s);
    return rc;
}

/* The host files of the node, below <state>.root: the files of /proc and /sys that vgpud and other tools read. */
#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CAPABILITIES "proc/driver/nvidia/capabilities"

static void make_parents(char *path)
{
    for (char *p = path + 1; *p != '\0'; p++) {
        if (*p != '/')
            continue;
        *p = '\0';
        mkdir(path, 0755);
        *p = '/';
    }
}

static void write_file(const char *name, const char *text)
{
    char path[8192];
    if (snprintf(path, sizeof(path), "%s.root/%s", sim_state_path(), name) >= (int)sizeof(path))
        return;
    make_parents(path);
    FILE *f = fopen(path, "we");
    if (f == NULL)
        return;
    fputs(text, f);
    fclose(f);
}

static void make_directory(const char *name)
{
    char path[8192];
    if (snprintf(path, sizeof(path), "%s.root/%s/", sim_state_path(), name) < (int)sizeof(path))
        make_parents(path);
}

static void remove_path(const char *name)
{
    char path[8192];
    if (snprintf(path, sizeof(path), "%s.root/%s", sim_state_path(), name) >= (int)sizeof(path))
        return;
    if (unlink(path) != 0 && errno == EISDIR)
        rmdir(path);
}

static void write_access(const char *name, uint32_t minor)
{
    char text[96];
    snprintf(text, sizeof(text), "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor);
    write_file(name, text);
}

void sim_tree_gi(struct sim_state *s, uint32_t device, uint32_t gi)
{
    const struct sim_device *d = &s->devices[device];
    char name[128];
    snprintf(name, sizeof(name), CAPABILITIES "/gpu%u/mig/gi%u/access", d->minor, gi);
    if (d->gis[gi].used) {
        write_access(name, d->gis[gi].minor);
        return;
    }
    remove_path(name);
    snprintf(name, sizeof(name), CAPABILITIES "/gpu%u/mig/gi%u", d->minor, gi);
    remove_path(name);
}

void sim_tree_ci(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci)
{
    const struct sim_device *d = &s->devices[device];
    const struct sim_ci *c = &d->gis[gi].cis[ci];
    char name[128];
    snprintf(name, sizeof(name), CAPABILITIES "/gpu%u/mig/gi%u/ci%u/access", d->minor, gi, ci);
    if (d->gis[gi].used && c->used) {
        write_access(name, c->minor);
        return;
    }
    remove_path(name);
    snprintf(name, sizeof(name), CAPABILITIES "/gpu%u/mig/gi%u/ci%u", d->minor, gi, ci);
    remove_path(name);
}

static void write_minors(struct sim_state *s)
{
    char path[4200];
    snprintf(path, sizeof(path), "%s.root/proc/driver/nvidia-caps/mig-minors", sim_state_path());
    write_file("proc/driver/nvidia-caps/mig-minors", "");
    FILE *f = fopen(path, "we");
    if (f == NULL)
        return;
    fprintf(f, "config 1\nmonitor 2\n");
    uint32_t minor = s->caps_minor_base;
    for (uint32_t g = 0; g < SIM_MAX_DEVICES; g++) {
        for (uint32_t gi = 0; gi < SIM_MAX_GIS; gi++) {
            fprintf(f, "gpu%u/gi%u/access %u\n", g, gi, minor++);
            for (uint32_t ci = 0; ci < SIM_MAX_CIS; ci++)
                fprintf(f, "gpu%u/gi%u/ci%u/access %u\n", g, gi, ci, minor++);
        }
    }
    fclose(f);
}

static void write_pci(const struct sim_device *d, const char *name, const char *format, uint32_t value)
{
    char path[192], text[64];
    snprintf(path, sizeof(path), "sys/bus/pci/devices/%04x:%02x:%02x.0/%s", d->pci_domain, d->pci_bus, d->pci_device,
             name);
    snprintf(text, sizeof(text), format, value);
    write_file(path, text);
}

static void write_gpu(const struct sim_device *d)
{
    char name[192], text[1024];
    snprintf(name, sizeof(name), "proc/driver/nvidia/gpus/%04x:%02x:%02x.0/information", d->pci_domain, d->pci_bus,
             d->pci_device);
    snprintf(text, sizeof(text),
             "Model: \t\t %s\nIRQ:   \t\t %u\nGPU UUID: \t %s\nVideo BIOS: \t %s\n"
             "Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
             "Bus Location: \t %04x:%02x:%02x.0\nDevice Minor: \t %u\n"
             "GPU Firmware: \t N/A\nGPU Excluded:\t No\n",
             d->name, 64 + d->minor, d->uuid, d->vbios, d->pci_domain, d->pci_bus, d->pci_device, d->minor);
    write_file(name, text);
    write_pci(d, "numa_node", "%u\n", d->numa_node);
    /* NVML has the device's id in the upper half and the vendor's in the lower one */
    write_pci(d, "vendor", "0x%04x\n", d->pci_device_id & 0xffff);
    write_pci(d, "device", "0x%04x\n", d->pci_device_id >> 16);
    write_pci(d, "subsystem_vendor", "0x%04x\n", d->pci_subsystem_id & 0xffff);
    write_pci(d, "subsystem_device", "0x%04x\n", d->pci_subsystem_id >> 16);
    write_pci(d, "class", "0x%06x\n", 0x030200);      /* a 3D controller (PCI Code and ID Assignment Specification) */
    write_pci(d, "resource", "0x%016x 0x0 0x0\n", 0); /* start, end, flags: no region */
    snprintf(name, sizeof(name), CAPABILITIES "/gpu%u/mig", d->minor);
    make_directory(name);
}

void sim_tree_write(struct sim_state *s)
{
    char text[512];
    snprintf(text, sizeof(text),
             "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  "
             "(vgpu-sim)\nGCC version:  gcc version 12.2.0\n",
             s->driver_version);
    write_file("proc/driver/nvidia/version", text);
    write_file("proc/driver/nvidia/params",
               "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n");
    write_access(CAPABILITIES "/mig/config", 1);
    write_access(CAPABILITIES "/mig/monitor", 2);
    write_file("proc/modules", "nvidia 14376960 0 - Live 0x0000000000000000 (O)\n");
    write_file("proc/devices", "Character devices:\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n"
                               "241 nvidia-caps\n");
    write_minors(s);
    for (uint32_t i = 0; i < s->device_count; i++)
        write_gpu(&s->devices[i]);
}

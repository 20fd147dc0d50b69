/*
 * unknown.h: functions of the driver that libvgpu does not know: those of a driver newer than its table.
 *
 * Precondition: libcuda is loaded, and `usage` is mapped writable.
 */
#ifndef VGPU_UNKNOWN_H
#define VGPU_UNKNOWN_H

#include "lease.h"

/*
 * Looks through what the loaded driver exports, and writes how many functions hooks.toml does not name, and the first
 * of them, to the page for vgpud. They pass: no limit holds there. Costs some 100 us; at cuInit.
 */
void vgpu_unknown_tell(struct vgpu_usage *usage);

#endif

/*
 * unknown.h: functions of the driver that libvgpu does not know: those of a driver newer than its table.
 *
 * Precondition: libcuda is loaded, and `usage` is mapped writable.
 */
#ifndef VGPU_UNKNOWN_H
#define VGPU_UNKNOWN_H

#include "lease.h"

/*
 * Counts the functions of the loaded driver that hooks.toml does not name, and writes the number and the first name to
 * the page for vgpud. Calls of them bypass the limits. Takes some 100 us, at cuInit.
 */
void vgpu_unknown_tell(struct vgpu_usage *usage);

#endif

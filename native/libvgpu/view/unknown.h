/*
 * unknown.h: finds functions of the driver that libvgpu does not know, because the driver is newer than libvgpu's
 * table.
 *
 * Precondition: libcuda is loaded, and `usage` is mapped writable.
 */
#ifndef VGPU_UNKNOWN_H
#define VGPU_UNKNOWN_H

#include "lease.h"

/*
 * Counts the functions of the loaded driver that hooks.toml does not name, and writes their number and the first name
 * to the page, where vgpud reads them. Calls of them bypass the limits. It takes some 100 us, at cuInit.
 */
void vgpu_unknown_tell(struct vgpu_usage *usage);

#endif

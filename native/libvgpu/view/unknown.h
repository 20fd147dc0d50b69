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
 * Counts the functions of the loaded driver's API (cu...) that hooks.toml does not name. Writes their number, and the
 * name that is first in the alphabet, to the `usage` page for vgpud. A call of such a function may bypass the limits.
 * The count takes some 100 us, at cuInit.
 */
void vgpu_unknown_tell(struct vgpu_usage *usage);

#endif

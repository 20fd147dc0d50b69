"""Where the movable memory of a lease is to be. vgpud requests it, and libvgpu moves the memory."""

from enum import IntEnum

from vgpud import lease_layout as layout


class LeaseMemory(IntEnum):
    """The place where the movable memory is to be (enum vgpu_lease_memory)."""

    FIXED = layout.MEMORY_FIXED  # the lease has no movable memory
    HERE = layout.MEMORY_HERE
    OUT = layout.MEMORY_OUT  # on the host; the tenant is suspended
    # the memory stays on the device, and libvgpu prepares host buffers, because OUT is likely to follow
    SOON = layout.MEMORY_SOON


class LeaseSaves(IntEnum):
    """What follows an eviction (enum vgpu_lease_saves)."""

    NOTHING = layout.SAVES_NOTHING
    REST = layout.SAVES_REST  # the driver saves the rest of the process
    # As REST, but the driver then restores the process on another device, which can read the memory of this
    # device. So libvgpu may leave (park) memory on this device.
    PARKED = layout.SAVES_PARKED

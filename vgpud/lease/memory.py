"""The state of a lease's movable memory, which vgpud requests and libvgpu follows."""

from enum import IntEnum

from vgpud import lease_layout as layout


class LeaseMemory(IntEnum):
    """Where the movable memory is to be (enum vgpu_lease_memory)."""

    FIXED = layout.MEMORY_FIXED  # there is no movable memory
    HERE = layout.MEMORY_HERE
    OUT = layout.MEMORY_OUT  # on the host, while the tenant is suspended
    SOON = layout.MEMORY_SOON  # on the device; host buffers are made, because OUT is likely to follow

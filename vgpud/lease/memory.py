"""The word of a lease about the memory that libvgpu can move."""

from enum import IntEnum

from vgpud import lease_layout as layout


class LeaseMemory(IntEnum):
    """Where it is (enum vgpu_lease_memory)."""

    FIXED = layout.MEMORY_FIXED  # there is none
    HERE = layout.MEMORY_HERE
    OUT = layout.MEMORY_OUT  # on the host, while the lease is away

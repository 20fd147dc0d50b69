"""Allocations like those of a busy node."""

import time
from dataclasses import replace

from vgpud.model.event import Event, EventKind
from vgpud.model.quantity import MIB, Percent
from vgpud.model.tenancy import (
    Allocation,
    DeviceNode,
    Edits,
    Isolation,
    Mode,
    Mount,
    Owner,
    Reason,
    Request,
    Slice,
    State,
)

MEMORY_BYTES = 64 * MIB  # ten thousand allocations of this size fit on eight large devices
UUIDS = tuple(f"GPU-{n:08d}-1111-2222-3333-444444444444" for n in range(8))


def allocation(number: int, uuids: tuple[str, ...] = UUIDS) -> Allocation:
    """A small preload allocation as its intent records it, with a reason for each device."""
    name = f"bench-{number:06d}"
    taken = number % len(uuids)
    return Allocation(
        id=name,
        request=Request(
            id=f"request-{number:06d}",
            owner=Owner(1000, 1000),
            memory_bytes=MEMORY_BYTES,
            share=Percent(50),
            isolation=Isolation.QUOTA,
            label="bench",
        ),
        state=State.ALLOCATING,
        slices=(Slice(uuids[taken], Mode.PRELOAD, MEMORY_BYTES, Percent(50)),),
        reasons=tuple(
            Reason(uuid, n == taken, Mode.PRELOAD, f"{141 - number % 97}GiB free of 141GiB")
            for n, uuid in enumerate(uuids)
        ),
        created_unix_ns=time.time_ns(),
    )


def active(intended: Allocation) -> Allocation:
    """The allocation as its commit records it, with the edits of libvgpu."""
    lease = f"/run/vgpud/leases/{intended.id}"
    edits = Edits(
        env=(("LD_PRELOAD", "/usr/lib/vgpud/libvgpu.so"), ("CUDA_VISIBLE_DEVICES", UUIDS[0])),
        host_env=(("VGPU_LEASE", lease),),
        mounts=(Mount("/usr/lib/vgpud", "/usr/lib/vgpud"), Mount(lease, "/run/vgpu", read_only=False)),
        device_nodes=(DeviceNode("/dev/nvidia0", 195, 0), DeviceNode("/dev/nvidiactl", 195, 255)),
    )
    return replace(intended, state=State.ACTIVE, edits=edits)


def event(subject: str) -> Event:
    return Event(0, EventKind.ALLOCATION_ACTIVE, subject, f"allocation {subject}: 64MiB", time.time_ns())

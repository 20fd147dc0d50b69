"""Allocations for tests of the ledger: simple ones by number, and random ones that the model allows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from vgpud.model.device import Placement
from vgpud.model.event import Event, EventKind
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import (
    Allocation,
    DeviceNode,
    Edits,
    Isolation,
    Lifetime,
    MigSlice,
    Mode,
    Mount,
    Owner,
    Reason,
    Request,
    Selector,
    Slice,
    State,
)

UUID = "GPU-0000000{}-1111-2222-3333-444444444444"


def allocation(number: int, state: State = State.ALLOCATING, **changes: Any) -> Allocation:
    """An allocation as an intent records it, without edits."""
    uuid = UUID.format(number % 8)
    base = Allocation(
        id=f"a{number}",
        request=Request(
            id=f"r{number}",
            owner=Owner(1000 + number % 3, 1000),
            memory_bytes=4 * GIB,
            share=Percent(2550),
            isolation=Isolation.QUOTA,
            label=f"job {number}",
            lifetime=Lifetime(100 + number, 7),
        ),
        state=state,
        slices=(Slice(uuid, Mode.PRELOAD, 4 * GIB, Percent(2550)),),
        reasons=tuple(
            Reason(UUID.format(n), n == number % 8, Mode.PRELOAD, f"{n}GiB free of 80GiB") for n in range(8)
        ),
        created_unix_ns=1_700_000_000_000_000_000 + number,
    )
    return replace(base, **changes)


def active(base: Allocation) -> Allocation:
    """The allocation as a commit records it."""
    lease = f"/run/vgpud/leases/{base.id}"
    edits = Edits(
        env=(("LD_PRELOAD", "/usr/lib/vgpud/libvgpu.so"), ("VGPU_LEASE", "/run/vgpu")),
        host_env=(("VGPU_LEASE", lease),),
        mounts=(Mount("/usr/lib/vgpud", "/usr/lib/vgpud"), Mount(lease, "/run/vgpu", read_only=False)),
        device_nodes=(DeviceNode("/dev/nvidia0", 195, 0), DeviceNode("/dev/nvidiactl")),
    )
    return replace(base, state=State.ACTIVE, edits=edits)


def event(subject: str, kind: EventKind = EventKind.ALLOCATION_ACTIVE) -> Event:
    return Event(0, kind, subject, f"something happened to {subject}", 42)


def ledger_path(folder: Path) -> Path:
    return folder / "ledger.db"


# strategies for random allocations that the model allows
_ids = st.text(min_size=1, max_size=8)
_percents = st.builds(Percent, st.integers(1, 10000))
_placements = st.builds(Placement, st.integers(0, 7), st.integers(1, 8))
_mig = st.builds(MigSlice, profile_id=st.integers(0, 300), profile_name=_ids, placement=_placements)
_slices = st.builds(
    Slice,
    device_uuid=_ids,
    mode=st.sampled_from(Mode),
    memory_bytes=st.integers(0, 2**56),
    share=st.none() | _percents,
    mig=st.none() | _mig,
)
_requests = st.builds(
    Request,
    id=_ids,
    owner=st.builds(Owner, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    memory_bytes=st.none() | st.integers(1, 2**56),
    share=st.none() | _percents,
    isolation=st.none() | st.sampled_from(Isolation),
    selector=st.builds(Selector, st.lists(_ids).map(tuple), st.lists(st.integers(0, 9)).map(tuple), _ids),
    lifetime=st.builds(Lifetime, st.integers(0, 2**22), st.integers(0, 2**62)),
)
_reasons = st.builds(Reason, _ids, st.booleans(), st.none() | st.sampled_from(Mode), st.text(max_size=20))
_pairs = st.lists(st.tuples(_ids, st.text(max_size=8)), max_size=3).map(tuple)
_edits = st.builds(
    Edits,
    env=_pairs,
    host_env=_pairs,
    mounts=st.lists(st.builds(Mount, _ids, _ids, st.booleans()), max_size=3).map(tuple),
    device_nodes=st.lists(st.builds(DeviceNode, _ids, st.none() | st.integers(0, 999)), max_size=3).map(
        tuple
    ),
)
allocations = st.builds(
    Allocation,
    id=_ids,
    request=_requests,
    state=st.sampled_from(State),
    slices=st.lists(_slices, max_size=3).map(tuple),
    reasons=st.lists(_reasons, max_size=3).map(tuple),
    edits=_edits,
    created_unix_ns=st.integers(0, 2**62),
    revision=st.integers(0, 2**62),
    failure=st.text(max_size=20),
)

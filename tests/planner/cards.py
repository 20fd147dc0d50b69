"""Devices for the planner's tests, made from profile tables as NVML reports them."""

from typing import Any

from vgpud.hardware.compute import presumed, with_compute
from vgpud.model.device import Device, GpuInstance, Link, Mig, MigProfile, Node, Placement
from vgpud.model.quantity import MIB, Percent
from vgpud.model.tenancy import Isolation, MigSlice, Mode, Owner, Request, Slice
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.fields import Match
from vgpud.policy.model import DeviceRule, Policy


def profile(
    number: int, name: str, slices: int, count: int, sms: int, mib: int, starts: tuple[int, ...], size: int
) -> MigProfile:
    plain = MigProfile(
        id=number,
        name=f"MIG {name}",
        slice_count=slices,
        instance_count=count,
        sm_count=sms,
        memory_bytes=mib * MIB,
        placements=tuple(Placement(start, size) for start in starts),
    )
    return with_compute(plain, presumed(plain))


# recorded on an H200, driver 580.159.04, in the order of NVML's loop index
H200_PROFILES = (
    profile(19, "1g.18gb", 1, 7, 16, 16384, (0, 1, 2, 3, 4, 5, 6), 1),
    profile(14, "2g.35gb", 2, 3, 32, 33280, (0, 2, 4), 2),
    profile(9, "3g.71gb", 3, 2, 60, 71424, (0, 4), 4),
    profile(5, "4g.71gb", 4, 1, 64, 71424, (0,), 4),
    profile(0, "7g.141gb", 7, 1, 132, 143360, (0,), 8),
    profile(20, "1g.18gb+me", 1, 1, 16, 16384, (0, 1, 2, 3, 4, 5, 6), 1),
    profile(15, "1g.35gb", 1, 4, 26, 33280, (0, 2, 4, 6), 2),
)
H200_WITHOUT_ME = tuple(p for p in H200_PROFILES if p.id != 20)

# A30 24 GB, from NVIDIA's MIG user guide
A30_PROFILES = (
    profile(14, "1g.6gb", 1, 4, 14, 5836, (0, 1, 2, 3), 1),
    profile(21, "1g.6gb+me", 1, 1, 14, 5836, (0, 1, 2, 3), 1),
    profile(5, "2g.12gb", 2, 2, 28, 11936, (0, 2), 2),
    profile(6, "2g.12gb+me", 2, 1, 28, 11936, (0, 2), 2),
    profile(0, "4g.24gb", 4, 1, 56, 24125, (0,), 4),
)

H200_TOTAL = 150754820096
H200_RESERVED = 644939776


H200_USABLE = H200_TOTAL - H200_RESERVED
OWNER = Owner(1000, 1000)


def h200(
    index: int, *, mig_on: bool = False, instances: tuple[GpuInstance, ...] = (), **fields: Any
) -> Device:
    """Device `index` of a node of H200s, four for each NUMA node. `fields` replace the device's own
    fields.
    """
    made: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "index": index,
        "name": "NVIDIA H200",
        "minor": index,
        "memory_total_bytes": H200_TOTAL,
        "memory_reserved_bytes": H200_RESERVED,
        "sm_count": 132,
        "compute_capability": (9, 0),
        "mig": Mig(capable=True, current=mig_on, pending=mig_on, profiles=H200_PROFILES, instances=instances),
        "mps_capable": True,
        "numa_node": index // 4,
    }
    return Device(**{**made, **fields})


def node_of(*devices: Device, links: dict[tuple[str, str], Link] | None = None) -> Node:
    return Node(devices=devices, links=links or {})


def h200_node(count: int) -> Node:
    return node_of(*(h200(i) for i in range(count)))


def request(**fields: Any) -> Request:
    """A request with `memory` (bytes), `share` (percent) and other fields of Request."""
    share = fields.pop("share", None)
    memory = fields.pop("memory", None)
    return Request(
        id="r",
        owner=OWNER,
        memory_bytes=memory,
        share=None if share is None else Percent(round(share * 100)),
        **fields,
    )


def policy(*rules: dict[str, Any], strategy: str = "pack") -> Policy:
    """A policy with these rules in order. The key `index` is short for a match by index."""
    made = []
    for rule in rules:
        keys = dict(rule)
        match = Match(index=keys.pop("index")) if "index" in keys else Match()
        made.append(DeviceRule(match=match, **keys))
    return Policy.model_validate({"planner": {"strategy": strategy}, "device": tuple(made)})


AUTO = policy()
HARDWARE, COMPUTE, QUOTA, WHOLE_DEVICE = (
    Isolation.HARDWARE,
    Isolation.COMPUTE,
    Isolation.QUOTA,
    Isolation.DEVICE,
)


def used(mode: Mode, *memory: int, share: int | None = None) -> DeviceUse:
    """The use of a device with one slice for each amount of memory. Each slice has a share of `share`
    hundredths.
    """
    use = EMPTY
    for amount in memory:
        use = use.with_slice(Slice("GPU", mode, amount, None if share is None else Percent(share)))
    return use


def used_mig(*places: tuple[int, int]) -> DeviceUse:
    """The use of an H200 with an instance for each (profile id, start)."""
    use = EMPTY
    for profile_id, start in places:
        kind = next(p for p in H200_PROFILES if p.id == profile_id)
        placement = next(p for p in kind.placements if p.start == start)
        mig = MigSlice(profile_id, kind.name, placement)
        use = use.with_slice(Slice("GPU", Mode.MIG, kind.memory_bytes, None, mig))
    return use


def instance(number: int, profile_id: int, start: int) -> GpuInstance:
    """A GPU instance of an H200 as NVML reports it."""
    kind = next(p for p in H200_PROFILES if p.id == profile_id)
    placement = next(p for p in kind.placements if p.start == start)
    return GpuInstance(number, profile_id, placement, ())

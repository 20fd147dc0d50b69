"""Formats values for people, as the tables show them."""

import pwd
import re
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.document import rfc3339
from vgpud.model.marks import MarkKind
from vgpud.model.quantity import show_bytes
from vgpud.model.tenancy import ANYONE, Mode, State

_AGES = ((86400, "d"), (3600, "h"), (60, "m"))


def memory(value: int) -> str:
    return show_bytes(value) if value else "0"


def used_memory(item: pb.NodeProcess | pb.MpsClient) -> str:
    return memory(item.memory_bytes) if item.HasField("memory_bytes") else ""


def percent(value: float) -> str:
    return f"{value:g}%"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def optional(item: Message, field: str) -> str:
    """The value of an optional field as text; empty if it is not known."""
    return str(getattr(item, field)) if item.HasField(field) else ""


def age(unix_ns: int, now_ns: int) -> str:
    """The time since `unix_ns` as text, in the largest whole unit."""
    if unix_ns <= 0:
        return ""
    return duration((now_ns - unix_ns) / 1e9)


def moment(unix_ns: int) -> str:
    """A time stamp as text, in whole seconds."""
    return f"{(rfc3339(unix_ns) or '').partition('.')[0]}Z" if unix_ns > 0 else ""


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit in _AGES:
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def user(uid: int) -> str:
    """The login name; the uid if this host has no name for it; "any" for ANYONE."""
    if uid == ANYONE:
        return "any"
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def passed(item: pb.Allocation) -> str:
    """The marks of a tenant that evades its limits: "bypassed", "tampered", both, or ""."""
    kinds = (MarkKind.BYPASSED, MarkKind.TAMPERED)
    return joined(mark.kind for mark in item.marks if mark.kind in kinds)


def stays(item: pb.Allocation) -> str:
    """Where the memory of a suspended allocation is; empty for others."""
    if item.state != State.SUSPENDED:
        return ""
    return f"{memory(item.suspended_bytes)} is on the host, {memory(item.stays_bytes)} stays on its devices"


def silent(mode: str) -> str:
    """The helper of a mode that did not answer, as a sentence."""
    return f"{'vgpu-arbiter' if mode == Mode.PRELOAD else 'the helper of mode ' + mode} does not answer"


def moved(item: pb.Allocation) -> str:
    """From and to which devices an allocation was moved since the planner's decision; empty if it was not."""
    chosen = {reason.device_uuid for reason in item.reasons if reason.taken}
    devices = {part.device_uuid for part in item.slices}
    if not chosen or chosen == devices:
        return ""
    left, new = (joined(map(short_uuid, sorted(one))) for one in (chosen - devices, devices - chosen))
    return f"from {left} to {new}, since the decision below"


def paused(item: pb.Allocation) -> str:
    """Text about the pause of an allocation: whether the driver keeps it off, or will after its resumption;
    empty if it is not paused.
    """
    if not item.paused:
        return ""
    if is_gated(item):
        return "asked for, but the driver does not stop it"
    return "yes, from its resumption on" if item.state == State.SUSPENDED else "yes"


def memory_limit(item: pb.Allocation) -> str:
    """The text in listings for what enforces an allocation's memory limit in mode preload; empty for other
    modes.
    """
    return {"driver": "by the driver", "libvgpu": "by libvgpu"}.get(item.memory_limit, "")


def is_gated(item: pb.Allocation) -> bool:
    """True if the driver refuses to keep this paused allocation off its devices."""
    return any(mark.kind == MarkKind.GATED for mark in item.marks)


def standing(text: str) -> str:
    """The beginning of the text that says what a suspended allocation waits for, short enough for a table;
    `vgpuctl show` prints all of it.
    """
    return re.split("[;:]", text, maxsplit=1)[0]


def stays_by_kind(item: pb.Allocation) -> str:
    """The memory that a suspension left on the devices, as text: kind and amount of each part."""
    return ", ".join(f"{one.kind} {memory(one.bytes)}" for one in item.stays)


def pod(names: pb.Workload) -> str:
    """The pod as "namespace/pod/container", without the parts that are not known."""
    return "/".join(filter(None, (names.namespace, names.pod, names.container))) if names.pod else ""


def pods(names: pb.Workload) -> tuple[str, ...]:
    """What a pod can be called: "pod", "namespace/pod" or all of its name; empty while it is unknown."""
    return (names.pod, f"{names.namespace}/{names.pod}", pod(names)) if names.pod else ()


def claim(names: pb.Workload) -> str:
    return f"{names.namespace}/{names.claim}" if names.claim else ""


def label(item: pb.Allocation) -> str:
    """The label of an allocation, and its pod if known."""
    return ", ".join(filter(None, (item.label, pod(item.workload))))


def short_uuid(uuid: str) -> str:
    """The UUID up to its first group of digits, which as a rule distinguishes the devices of a node."""
    prefix, _, rest = uuid.partition("-")
    first = rest.partition("-")[0]
    return f"{prefix}-{first}" if first else uuid


def joined(values: Iterable[str]) -> str:
    return ",".join(values)


def alike(values: Sequence[str]) -> str:
    """The value that all slices have in common, otherwise the values of all slices."""
    return values[0] if len(set(values)) == 1 else joined(values)


def share(part: pb.Slice) -> str:
    return percent(part.share_percent) if part.HasField("share_percent") else ""


def shares_memory(part: pb.Slice) -> bool:
    """Is the slice a compute instance? Its GPU instance's memory is shared by all compute instances in it,
    without limits.
    """
    return part.mode == "mig" and part.mig.HasField("compute_placement")


def held_memory(part: pb.Slice) -> str:
    """The memory of a slice as text. A compute instance gets its even part of the GPU instance's memory,
    marked as shared.
    """
    shown = memory(part.memory_bytes)
    return f"{shown}, shared" if shares_memory(part) else shown


def mig_name(part: pb.Slice) -> str:
    """The MIG profile and placement of a slice, for example 1g.18gb@2; for a compute instance also its
    compute slice, 1c.3g.71gb@4/1.
    """
    if not part.HasField("mig"):
        return ""
    inside = f"/{part.mig.compute_placement.start}" if part.mig.HasField("compute_placement") else ""
    return f"{part.mig.profile_name}@{part.mig.placement.start}{inside}"

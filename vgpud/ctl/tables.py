"""Converts the API's messages to tables. Columns marked `wide` are shown with -o wide only."""

from collections.abc import Iterable, Sequence
from typing import Literal

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.table import Column, Table
from vgpud.model.tenancy import State

HEALTH_STYLES = {"lost": "red", "failed": "red", "silent": "red", "sick": "red"}
STATE_STYLES = {"failed": "red", "allocating": "yellow", "releasing": "yellow"}
TAKEN_STYLES = {"yes": "green"}

DEVICE_COLUMNS = (
    Column("INDEX", right=True),
    Column("NAME"),
    Column("DEVICE"),
    Column("MODE"),
    Column("MEMORY", right=True),
    Column("ALLOCATED", right=True),
    Column("USED", right=True),
    Column("SHARE", right=True),
    Column("ALLOCATIONS", right=True),
    Column("HEALTH", styles=HEALTH_STYLES),
    Column("UUID", wide=True),
    Column("PCI", wide=True),
    Column("POLICY", wide=True),
    Column("ENGINE", wide=True),
    Column("MIG", wide=True),
    Column("SMS", right=True, wide=True),
    Column("CC", right=True, wide=True),
    Column("NUMA", right=True, wide=True),
    Column("COMPUTE-MODE", wide=True),
    Column("PROCESSES", right=True, wide=True),
    Column("HEALTH-REASON", wide=True),
)


def devices(items: Iterable[pb.Device]) -> Table:
    return Table(DEVICE_COLUMNS, [_device_row(item) for item in items])


def _mode(item: pb.Device) -> str:
    """The device's mode, and the policy's if that waits for the tenants in another mode to end."""
    waits = item.mode and item.policy_mode not in ("", "auto", item.mode)
    return (
        (item.mode or "idle")
        + (f", {item.policy_mode} waits" if waits else "")
        + (", drained" if item.drained else "")
    )


def _device_row(item: pb.Device) -> Sequence[str]:
    usable = max(0, item.memory_total_bytes - item.memory_reserved_bytes)
    return (
        str(item.index),
        item.name,
        words.short_uuid(item.uuid),
        _mode(item),
        words.memory(usable),
        words.memory(item.memory_allocated_bytes),
        words.memory(item.memory_used_bytes),
        words.percent(item.share_allocated_percent),
        str(item.allocation_count),
        item.health,
        item.uuid,
        item.pci_bus_id,
        item.policy_mode,
        f"{item.engine} ({item.engine_reason})" if item.engine else "",
        _mig_state(item.mig),
        words.optional(item.sm_count, item.HasField("sm_count")),
        item.compute_capability,
        words.optional(item.numa_node, item.HasField("numa_node")),
        item.compute_mode,
        str(len(item.processes)),
        item.health_reason,
    )


def _mig_state(mig: pb.Mig) -> str:
    if not mig.capable:
        return ""
    now = "on" if mig.current else "off"
    if mig.current != mig.pending:
        return f"{now}, {'on' if mig.pending else 'off'} after a reset"
    return now


ALLOCATION_COLUMNS = (
    Column("ID"),
    Column("OWNER"),
    Column("STATE", styles=STATE_STYLES),
    Column("MODE"),
    Column("DEVICES"),
    Column("MEMORY", right=True),
    Column("SHARE", right=True),
    Column("AGE", right=True),
    Column("LABEL"),
    Column("PID", right=True, wide=True),
    Column("MIG", wide=True),
    Column("CDI", wide=True),
    Column("REQUEST", wide=True),
    Column("REVISION", right=True, wide=True),
)


def allocations(items: Iterable[pb.Allocation], now_ns: int) -> Table:
    """The table of allocations. Memory and share are per slice."""
    return Table(ALLOCATION_COLUMNS, [_allocation_row(item, now_ns) for item in items])


def _allocation_row(item: pb.Allocation, now_ns: int) -> Sequence[str]:
    parts = item.slices
    shares = [words.share(part) or "-" for part in parts]
    return (
        item.id,
        words.user(item.owner_uid),
        _state(item),
        words.joined(dict.fromkeys(part.mode for part in parts)),
        words.joined(words.short_uuid(part.device_uuid) for part in parts),
        _of_each([words.held_memory(part) for part in parts]),
        _of_each(shares),
        words.age(item.created_unix_ns, now_ns),
        words.label(item),
        str(item.bound_pid or ""),
        words.joined(filter(None, (words.mig_name(part) for part in parts))),
        item.cdi_name,
        item.request_id,
        str(item.revision),
    )


def _state(item: pb.Allocation) -> str:
    also = "paused" if item.paused and item.state == State.SUSPENDED else ""
    said = [words.passed(item), words.standing(item.standing), also]
    return f"{item.state} ({', '.join(filter(None, said))})" if any(said) else item.state


def _of_each(values: Sequence[str]) -> str:
    """The value of each slice as text; "2 x 1GiB" if two slices have the same value."""
    if len(values) > 1 and len(set(values)) == 1 and values[0] != "-":
        return f"{len(values)} x {values[0]}"
    return words.alike(list(values)) if values else ""


def slices(item: pb.Allocation) -> Table:
    """The slices of one allocation with their use, as far as the daemon reports it.

    USABLE is the limit less the driver's own memory for contexts and modules. It is empty for compute
    instances, which share the memory of their GPU instance without limits. REFUSED counts requests beyond the
    limit; CARD-FULL counts requests within the limit that the card had no memory for.
    """
    columns = (
        Column("DEVICE"),
        Column("MODE"),
        Column("MIG"),
        Column("MEMORY", right=True),
        Column("USABLE", right=True),
        Column("SHARE", right=True),
        Column("USED", right=True),
        Column("PEAK", right=True),
        Column("REFUSED", right=True),
        Column("CARD-FULL", right=True),
        Column("HAD", right=True),
        Column("WAITED", right=True),
        Column("PIDS"),
        Column("GRANTED", right=True, wide=True),
        Column("OVERRUN", right=True, wide=True),
        Column("BYPASSED", right=True, wide=True),
        Column("DRIVER", right=True, wide=True),
        Column("MIG-UUID", wide=True),
    )
    use = {entry.device_uuid: entry for entry in item.use}
    return Table(columns, [_slice_row(part, use.get(part.device_uuid), item) for part in item.slices])


def planned(parts: Sequence[pb.Slice]) -> Table:
    """The table of slices that a request would get."""
    columns = (
        Column("DEVICE"),
        Column("MODE"),
        Column("MIG"),
        Column("MEMORY", right=True),
        Column("SHARE", right=True),
    )
    rows = [
        (
            words.short_uuid(part.device_uuid),
            part.mode,
            words.mig_name(part),
            words.held_memory(part),
            words.share(part),
        )
        for part in parts
    ]
    return Table(columns, rows)


def _slice_row(part: pb.Slice, use: pb.SliceUse | None, item: pb.Allocation) -> Sequence[str]:
    # libvgpu also counts what a suspension has moved to the host
    used_bytes = item.stays_bytes if item.state == State.SUSPENDED else use.memory_used_bytes if use else 0
    return (
        part.device_uuid,
        part.mode,
        words.mig_name(part),
        words.held_memory(part),
        words.memory(max(part.memory_bytes - use.memory_driver_bytes, 0))
        if use and not words.shares_memory(part)
        else "",
        words.share(part),
        words.memory(used_bytes) if use else "",
        words.memory(use.memory_peak_bytes) if use else "",
        str(use.refusals_limit) if use else "",
        str(use.refusals_card) if use else "",
        _seconds(use, "compute_used_ns"),
        _seconds(use, "compute_waited_ns"),
        words.joined(str(pid) for pid in use.pids) if use else "",
        _seconds(use, "compute_granted_ns"),
        _seconds(use, "compute_overrun_ns"),
        str(use.compute_bypasses) if use is not None and use.HasField("compute_bypasses") else "",
        words.memory(use.memory_driver_bytes) if use else "",
        part.mig.uuid,
    )


_Time = Literal["compute_used_ns", "compute_waited_ns", "compute_granted_ns", "compute_overrun_ns"]


def _seconds(use: pb.SliceUse | None, field: _Time) -> str:
    known = use is not None and use.HasField(field)
    return f"{getattr(use, field) / 1e9:.1f}s" if known else ""


def reasons(items: Iterable[pb.Reason]) -> Table:
    columns = (Column("TAKEN", styles=TAKEN_STYLES), Column("DEVICE"), Column("MODE"), Column("WHY"))
    alike: dict[tuple[bool, str, str], list[str]] = {}
    for item in items:
        alike.setdefault((item.taken, item.mode, item.sentence), []).append(item.device_uuid)
    rows = [
        (words.yes(taken), _first_of(uuids), mode, sentence)
        for (taken, mode, sentence), uuids in alike.items()
    ]
    return Table(columns, rows)


def _first_of(uuids: Sequence[str]) -> str:
    """The first device's short UUID, followed by the number of further devices."""
    more = len(uuids) - 1
    return words.short_uuid(uuids[0]) + (f" and {more} more" if more else "")


def steps(items: Iterable[pb.Step]) -> Table:
    columns = (Column("STEP", right=True), Column("DO"), Column("DEVICE"), Column("MODE"), Column("WHY"))
    rows = [
        (str(number), item.kind, words.short_uuid(item.device_uuid), item.mode, item.reason)
        for number, item in enumerate(items, 1)
    ]
    return Table(columns, rows)

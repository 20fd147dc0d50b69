"""Converts the API's messages to tables. Columns marked `wide` are shown with -o wide only."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import words
from vgpud.ctl.mig_tables import mig_mode
from vgpud.ctl.table import Column, Table
from vgpud.model.tenancy import State

HEALTH_STYLES = {"lost": "red", "failed": "red", "silent": "red", "sick": "red"}
STATE_STYLES = {"failed": "red", "allocating": "yellow", "releasing": "yellow"}
TAKEN_STYLES = {"yes": "green"}


def devices(items: Iterable[pb.Device]) -> Table:
    return Table.of(
        (
            Column("INDEX", lambda d: str(d.index), right=True),
            Column("NAME", lambda d: d.name),
            Column("DEVICE", lambda d: words.short_uuid(d.uuid)),
            Column("MODE", _mode),
            Column("MEMORY", _usable_memory, right=True),
            Column("ALLOCATED", lambda d: words.memory(d.memory_allocated_bytes), right=True),
            Column("USED", lambda d: words.memory(d.memory_used_bytes), right=True),
            Column("SHARE", lambda d: words.percent(d.share_allocated_percent), right=True),
            Column("ALLOCATIONS", lambda d: str(d.allocation_count), right=True),
            Column("HEALTH", lambda d: d.health, styles=HEALTH_STYLES),
            Column("UUID", lambda d: d.uuid, wide=True),
            Column("PCI", lambda d: d.pci_bus_id, wide=True),
            Column("POLICY", lambda d: d.policy_mode, wide=True),
            Column("ENGINE", lambda d: f"{d.engine} ({d.engine_reason})" if d.engine else "", wide=True),
            Column("MIG", lambda d: _mig_state(d.mig), wide=True),
            Column("SMS", lambda d: words.optional(d, "sm_count"), right=True, wide=True),
            Column("CC", lambda d: d.compute_capability, right=True, wide=True),
            Column("NUMA", lambda d: words.optional(d, "numa_node"), right=True, wide=True),
            Column("COMPUTE-MODE", lambda d: d.compute_mode, wide=True),
            Column("PROCESSES", lambda d: str(len(d.processes)), right=True, wide=True),
            Column("HEALTH-REASON", lambda d: d.health_reason, wide=True),
        ),
        items,
    )


def _mode(item: pb.Device) -> str:
    """The device's mode, the policy's mode if that waits for tenants to end, and whether it is drained."""
    waits = item.mode and item.policy_mode not in ("", "auto", item.mode)
    return (
        (item.mode or "idle")
        + (f", {item.policy_mode} waits" if waits else "")
        + (", drained" if item.drained else "")
    )


def _usable_memory(item: pb.Device) -> str:
    return words.memory(max(0, item.memory_total_bytes - item.memory_reserved_bytes))


def _mig_state(mig: pb.Mig) -> str:
    return mig_mode(mig) if mig.capable else ""


def allocations(items: Iterable[pb.Allocation], now_ns: int) -> Table:
    """The table of allocations. Memory and share are per slice."""
    return Table.of(
        (
            Column("ID", lambda a: a.id),
            Column("OWNER", lambda a: words.user(a.owner_uid)),
            Column("STATE", _state, styles=STATE_STYLES),
            Column("MODE", lambda a: words.joined(dict.fromkeys(part.mode for part in a.slices))),
            Column("DEVICES", lambda a: words.joined(words.short_uuid(p.device_uuid) for p in a.slices)),
            Column("MEMORY", lambda a: _of_each([words.held_memory(p) for p in a.slices]), right=True),
            Column("SHARE", lambda a: _of_each([words.share(p) or "-" for p in a.slices]), right=True),
            Column("AGE", lambda a: words.age(a.created_unix_ns, now_ns), right=True),
            Column("LABEL", words.label),
            Column("PID", lambda a: str(a.bound_pid or ""), right=True, wide=True),
            Column("MIG", lambda a: words.joined(filter(None, map(words.mig_name, a.slices))), wide=True),
            Column("CDI", lambda a: a.cdi_name, wide=True),
            Column("REQUEST", lambda a: a.request_id, wide=True),
            Column("REVISION", lambda a: str(a.revision), right=True, wide=True),
        ),
        items,
    )


def _state(item: pb.Allocation) -> str:
    also = "paused" if item.paused and item.state == State.SUSPENDED else ""
    said = [words.passed(item), words.standing(item.standing), also]
    return f"{item.state} ({', '.join(filter(None, said))})" if any(said) else item.state


def _of_each(values: Sequence[str]) -> str:
    """The values of all slices as text: "2 x 1GiB" if they are the same, otherwise each of them."""
    if len(values) > 1 and len(set(values)) == 1 and values[0] != "-":
        return f"{len(values)} x {values[0]}"
    return words.alike(list(values)) if values else ""


def slices(item: pb.Allocation) -> Table:
    """The slices of one allocation with their use, as far as the daemon reports it.

    USABLE is the limit less the driver's own memory for contexts and modules. It is empty where that memory
    is not known, and for compute instances, which share the memory of their GPU instance without limits.
    REFUSED counts requests beyond the limit; CARD-FULL counts requests within the limit that the card had no
    memory for.
    """
    found = {entry.device_uuid: entry for entry in item.use}

    def used(part: pb.Slice) -> str:
        # libvgpu also counts what a suspension has moved to the host
        use = found[part.device_uuid]
        return words.memory(item.stays_bytes if item.state == State.SUSPENDED else use.memory_used_bytes)

    def usable(part: pb.Slice) -> str:
        use = found[part.device_uuid]
        if words.shares_memory(part) or not use.HasField("memory_driver_bytes"):
            return ""
        return words.memory(max(part.memory_bytes - use.memory_driver_bytes, 0))

    def of_use(shown: Callable[[pb.SliceUse], str]) -> Callable[[pb.Slice], str]:
        return if_known(lambda part: shown(found[part.device_uuid]))

    def if_known(shown: Callable[[pb.Slice], str]) -> Callable[[pb.Slice], str]:
        return lambda part: shown(part) if part.device_uuid in found else ""

    columns = (
        Column("DEVICE", lambda part: part.device_uuid),
        Column("MODE", lambda part: part.mode),
        Column("MIG", words.mig_name),
        Column("MEMORY", words.held_memory, right=True),
        Column("USABLE", if_known(usable), right=True),
        Column("SHARE", words.share, right=True),
        Column("USED", if_known(used), right=True),
        Column("PEAK", of_use(lambda use: _memory(use, "memory_peak_bytes")), right=True),
        Column("REFUSED", of_use(lambda use: words.optional(use, "refusals_limit")), right=True),
        Column("CARD-FULL", of_use(lambda use: words.optional(use, "refusals_card")), right=True),
        Column("HAD", of_use(lambda use: _seconds(use, "compute_used_ns")), right=True),
        Column("WAITED", of_use(lambda use: _seconds(use, "compute_waited_ns")), right=True),
        Column("PIDS", of_use(lambda use: words.joined(map(str, use.pids)))),
        Column("GRANTED", of_use(lambda use: _seconds(use, "compute_granted_ns")), right=True, wide=True),
        Column("OVERRUN", of_use(lambda use: _seconds(use, "compute_overrun_ns")), right=True, wide=True),
        Column(
            "BYPASSED", of_use(lambda use: words.optional(use, "compute_bypasses")), right=True, wide=True
        ),
        Column("DRIVER", of_use(lambda use: _memory(use, "memory_driver_bytes")), right=True, wide=True),
        Column("MIG-UUID", lambda part: part.mig.uuid, wide=True),
    )
    return Table.of(columns, item.slices)


def planned(parts: Sequence[pb.Slice]) -> Table:
    """The table of slices that a request would get."""
    columns = (
        Column("DEVICE", lambda part: words.short_uuid(part.device_uuid)),
        Column("MODE", lambda part: part.mode),
        Column("MIG", words.mig_name),
        Column("MEMORY", words.held_memory, right=True),
        Column("SHARE", words.share, right=True),
    )
    return Table.of(columns, parts)


_Time = Literal["compute_used_ns", "compute_waited_ns", "compute_granted_ns", "compute_overrun_ns"]


def _memory(use: pb.SliceUse, field: Literal["memory_driver_bytes", "memory_peak_bytes"]) -> str:
    return words.memory(getattr(use, field)) if use.HasField(field) else ""


def _seconds(use: pb.SliceUse, field: _Time) -> str:
    return f"{getattr(use, field) / 1e9:.1f}s" if use.HasField(field) else ""


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

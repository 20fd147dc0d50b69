"""What it takes to bring one device's MIG to a layout: steps in order, or who is in the way. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Mode
from vgpud.planner import layouts
from vgpud.planner.geometry import SlotKey, Table, table_for
from vgpud.planner.layouts import AUTO, OFF, Blocked
from vgpud.planner.pool import Pool, Stock, stock_of
from vgpud.planner.terms import bare_name
from vgpud.planner.transitions import between, defragmented, steps
from vgpud.planner.use import DeviceUse


class Do(StrEnum):
    ENABLE = "enable"  # MIG mode
    DESTROY = "destroy"
    CREATE = "create"
    DISABLE = "disable"
    RELEASE = "release"  # MIG mode goes back to what it was, if nothing is left that needs it


@dataclass(frozen=True, slots=True)
class MigStep:
    """`key` is the instance of DESTROY and CREATE."""

    do: Do
    device_uuid: str
    reason: str
    profile_name: str = ""
    key: SlotKey | None = None

    @property
    def fault_point(self) -> str:
        """The name under which tests cut a plan after this step."""
        return self.do.value if self.key is None else f"{self.do.value}-{self.key[0]}@{self.key[1].start}"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """`layout` is what the device shall have from then on: None for none that is fixed.

    `off` says that MIG mode shall be off. With `blockers` (instances) or `obstacle` (in words) there
    are no steps.
    """

    device: Device
    steps: tuple[MigStep, ...] = ()
    layout: frozenset[SlotKey] | None = None
    off: bool = False
    blockers: tuple[SlotKey, ...] = ()
    obstacle: str = ""

    @property
    def possible(self) -> bool:
        return not self.blockers and not self.obstacle


def plan_device(device: Device, use: DeviceUse, pool: Pool, words: Sequence[str]) -> DevicePlan:
    """From what stands to `words`. Raises VgpuError: UNSUPPORTED, BAD_REQUEST, IMPOSSIBLE."""
    if not device.mig.capable or not device.mig.profiles:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"device {device.index} ({device.name}) cannot be partitioned by MIG",
            "name one that can: see 'vgpuctl mig ls'",
        )
    table = table_for(device.mig.profiles)
    stock = stock_of(table, device, use.mig, pool)
    special = tuple(words)
    if special == (OFF,):
        return _to_off(device, use, table, stock)
    if special == (AUTO,):
        return _to_auto(device, use, table, stock, pool)
    target = layouts.target(table, stock.layout, stock.pinned, special)
    obstacle = _obstacle(device, use)
    if obstacle:
        return DevicePlan(device, obstacle=obstacle)
    if isinstance(target, Blocked):
        return DevicePlan(device, blockers=target.pinned)
    return DevicePlan(
        device,
        steps=(*_enable(device), *_changes(device, table, stock.layout.slots, target)),
        layout=frozenset(table.keys(target)),
    )


def plan_defrag(device: Device, use: DeviceUse, pool: Pool) -> DevicePlan:
    """Idle instances moved so that larger ones fit; no steps where that gains nothing."""
    table = table_for(device.mig.profiles)
    stock = stock_of(table, device, use.mig, pool)
    target = defragmented(table, stock.layout, stock.pinned)
    if target is None:
        return DevicePlan(device, layout=pool.layout)
    before = {p.id for p in table.free_profiles(stock.layout)}
    after = {p.id for p in table.free_profiles(stock.layout._replace(slots=target))}
    gained = [bare_name(p.name) for p in table.profiles if p.id in after - before]
    why = f"room for {', '.join(gained)}" if gained else "more room"
    layout = None
    if pool.layout is not None:
        moved = between(stock.layout.slots, target)
        kept = pool.layout - frozenset(table.keys(moved.destroy))
        layout = kept | frozenset(table.keys(moved.create))
    return DevicePlan(
        device,
        steps=tuple(_changes(device, table, stock.layout.slots, target, f"it moves, which makes {why}")),
        layout=layout,
    )


def _obstacle(device: Device, use: DeviceUse) -> str:
    """Why a device cannot hold MIG instances now."""
    if use.mode not in (None, Mode.MIG):
        return f"device {device.index} is in mode {use.mode} with {use.count} allocations"
    if device.mig.current != device.mig.pending:
        return f"device {device.index} has a reset due, which brings MIG mode {_on(device.mig.pending)}"
    return ""


def _on(enabled: bool) -> str:
    return "on" if enabled else "off"


def _enable(device: Device) -> tuple[MigStep, ...]:
    if device.mig.current:
        return ()
    return (MigStep(Do.ENABLE, device.uuid, "MIG mode is off"),)


def _changes(device: Device, table: Table, now: int, target: int, why: str = "") -> list[MigStep]:
    """Steps with `why` as the reason of each; without it, what the layout says of the place."""
    names = {profile.id: bare_name(profile.name) for profile in table.profiles}
    made = []
    for step in steps(table, between(now, target)):
        place = f"at memory slice {step.key[1].start}"
        said = f"the layout has it {place}" if step.create else f"the layout has nothing like it {place}"
        do = Do.CREATE if step.create else Do.DESTROY
        made.append(MigStep(do, device.uuid, why or said, names[step.key[0]], step.key))
    return made


def _to_off(device: Device, use: DeviceUse, table: Table, stock: Stock) -> DevicePlan:
    if use.mode is not None and use.mode is not Mode.MIG:
        return DevicePlan(device, off=True)  # MIG mode is off there
    if stock.pinned:
        return DevicePlan(device, off=True, blockers=table.keys(stock.pinned))
    if stock.layout.blocked:
        sentence = f"device {device.index} has an instance that its table of profiles does not list"
        return DevicePlan(device, off=True, obstacle=sentence)
    going = _changes(device, table, stock.layout.slots, 0)
    switch = (MigStep(Do.DISABLE, device.uuid, "MIG mode is on"),) if device.mig.current else ()
    return DevicePlan(device, steps=(*going, *switch), off=True)


def _to_auto(device: Device, use: DeviceUse, table: Table, stock: Stock, pool: Pool) -> DevicePlan:
    """Idle instances of our own go: from here on they come and go with the requests."""
    own = table.state(key for key in pool.own if key in table.number)
    idle = stock.layout.slots & own & ~stock.pinned
    names = {profile.id: bare_name(profile.name) for profile in table.profiles}
    going = [
        MigStep(Do.DESTROY, device.uuid, "nobody holds it and no layout has it", names[key[0]], key)
        for key in table.keys(idle)
    ]
    last = () if use.count or not device.mig.current else (_release(device),)
    return DevicePlan(device, steps=(*going, *last))


def _release(device: Device) -> MigStep:
    return MigStep(Do.RELEASE, device.uuid, "MIG mode goes back to what it was before vgpud")

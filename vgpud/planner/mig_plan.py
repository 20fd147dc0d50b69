"""Plans the change of one device to a MIG layout: ordered steps, or the instances in use that block
it. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode
from vgpud.planner import layouts
from vgpud.planner.geometry import ComputeKey, MigGeometry, SlotKey, geometry_for
from vgpud.planner.layouts import AUTO, OFF, Blocked
from vgpud.planner.mig_parts import LayoutStep, Scene, divide, moves, part_name, scene_of, split
from vgpud.planner.pool import Pool, Stock, stock_of
from vgpud.planner.terms import bare_name
from vgpud.planner.transitions import between, defragmented
from vgpud.planner.use import DeviceUse


class Do(StrEnum):
    ENABLE = "enable"  # enable MIG mode
    DESTROY = "destroy"
    CREATE = "create"
    DISABLE = "disable"
    RELEASE = "release"  # restore the original MIG mode, if no instance is left


@dataclass(frozen=True, slots=True)
class MigStep:
    """One step. `key` is the GPU instance to create or destroy; `part` is the compute instance in it, or None
    for all of it.
    """

    do: Do
    device_uuid: str
    reason: str
    profile_name: str = ""
    key: SlotKey | None = None
    part: SlotKey | None = None

    @property
    def fault_point(self) -> str:
        """The name of the point after this step at which tests interrupt a plan."""
        if self.key is None:
            return self.do.value
        inside = "" if self.part is None else f"/{self.part[0]}@{self.part[1].start}"
        return f"{self.do.value}-{self.key[0]}@{self.key[1].start}{inside}"

    @property
    def words(self) -> str:
        """The step as text: the action and its place."""
        if self.key is None:
            return f"{self.do.value} MIG mode"
        inside = "" if self.part is None else f", compute slice {self.part[1].start}"
        return f"{self.do.value} {self.profile_name} at memory slice {self.key[1].start}{inside}"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The plan for one device. `layout` is the layout after the plan, or None for a device without a fixed
    one; `computes` are the compute instances that divide its GPU instances.

    `off`: MIG mode is to be off after the plan. With `blockers` (instances) or an `obstacle` (a sentence)
    there are no steps.
    """

    device: Device
    steps: tuple[MigStep, ...] = ()
    layout: frozenset[SlotKey] | None = None
    off: bool = False
    blockers: tuple[SlotKey, ...] = ()
    obstacle: str = ""
    computes: frozenset[ComputeKey] = frozenset()

    @property
    def possible(self) -> bool:
        return not self.blockers and not self.obstacle


def plan_device(device: Device, use: DeviceUse, pool: Pool, words: Sequence[str]) -> DevicePlan:
    """The plan that turns the device's existing instances into the layout that `words` name. Raises
    VgpuError: UNSUPPORTED, BAD_REQUEST, IMPOSSIBLE.
    """
    if not device.mig.capable or not device.mig.profiles:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"device {device.index} ({device.name}) cannot be partitioned by MIG",
            "name a device that can be partitioned, see 'vgpuctl mig ls'",
        )
    geometry = geometry_for(device.mig.profiles)
    stock = stock_of(geometry, device, use.mig, pool)
    special = tuple(words)
    if special == (OFF,):
        return _to_off(device, use, geometry, stock, pool)
    if special == (AUTO,):
        return _to_auto(device, use, geometry, stock, pool)
    plain, bins = split(geometry, special)
    target = layouts.target(geometry, stock.layout, stock.pinned, plain)
    obstacle = _obstacle(device, use)
    if obstacle:
        return DevicePlan(device, obstacle=obstacle)
    scene = scene_of(device, geometry, stock, use, pool)
    computes = target if isinstance(target, Blocked) else divide(scene, bins, target)
    if isinstance(target, Blocked) or isinstance(computes, Blocked):
        assert isinstance(computes, Blocked)
        return DevicePlan(device, blockers=computes.pinned)
    return DevicePlan(
        device,
        steps=(*_enable(device), *changes(scene, target, computes)),
        layout=frozenset(geometry.keys(target)),
        computes=computes,
    )


def plan_defrag(device: Device, use: DeviceUse, pool: Pool) -> DevicePlan:
    """Plans moves of idle instances so that larger ones fit. The plan has no steps if no move gains room."""
    geometry = geometry_for(device.mig.profiles)
    stock = stock_of(geometry, device, use.mig, pool)
    scene = scene_of(device, geometry, stock, use, pool)
    divided = {key for key, _ in pool.computes} | scene.parts.keys()
    target = defragmented(
        geometry, stock.layout, stock.pinned | geometry.state(divided & geometry.number.keys())
    )
    if target is None:
        return DevicePlan(device, layout=pool.layout, computes=pool.computes)
    before = {p.id for p in geometry.free_profiles(stock.layout)}
    after = {p.id for p in geometry.free_profiles(stock.layout._replace(slots=target))}
    gained = [bare_name(p.name) for p in geometry.profiles if p.id in after - before]
    why = f"room for {', '.join(gained)}" if gained else "more room"
    layout = None
    if pool.layout is not None:
        moved = between(stock.layout.slots, target)
        kept = pool.layout - frozenset(geometry.keys(moved.destroy))
        layout = kept | frozenset(geometry.keys(moved.create))
    return DevicePlan(
        device,
        steps=tuple(changes(scene, target, _kept(scene), f"it moves, which makes {why}")),
        layout=layout,
        computes=pool.computes,
    )


def _obstacle(device: Device, use: DeviceUse) -> str:
    """Returns why a device cannot have MIG instances now; empty if it can."""
    if use.mode not in (None, Mode.MIG):
        return f"device {device.index} is in mode {use.mode} with {counted(use.count, 'allocation')}"
    if device.mig.current != device.mig.pending:
        return f"device {device.index} has a reset due, which brings MIG mode {_on(device.mig.pending)}"
    return ""


def _on(enabled: bool) -> str:
    return "on" if enabled else "off"


def _enable(device: Device) -> tuple[MigStep, ...]:
    if device.mig.current:
        return ()
    return (MigStep(Do.ENABLE, device.uuid, "MIG mode is off"),)


def _kept(scene: Scene) -> frozenset[ComputeKey]:
    """The present compute instances in divided GPU instances."""
    return frozenset(
        (key, part) for key, d in scene.parts.items() for part in d.geometry.keys(d.layout.slots)
    )


def changes(
    scene: Scene, target: int, computes: frozenset[ComputeKey] = frozenset(), why: str = ""
) -> list[MigStep]:
    """The steps from the present instances to `target`. `why` is the reason of each step; without it, the
    reason names the layout.
    """
    made = []
    for move in moves(scene, target, computes):
        place = f"at memory slice {move.key[1].start}"
        said = f"the layout has it {place}" if move.create else f"the layout has nothing like it {place}"
        made.append(step_of(scene.device, move, why or said))
    return made


def step_of(device: Device, move: LayoutStep, why: str) -> MigStep:
    do = Do.CREATE if move.create else Do.DESTROY
    if move.part is not None:
        return MigStep(do, device.uuid, why, part_name(device, move.key, move.part), move.key, move.part)
    profile = device.mig.profile(move.key[0])
    name = str(move.key[0]) if profile is None else bare_name(profile.name)
    return MigStep(do, device.uuid, why, name, move.key)


def _to_off(device: Device, use: DeviceUse, geometry: MigGeometry, stock: Stock, pool: Pool) -> DevicePlan:
    if use.mode is not None and use.mode is not Mode.MIG:
        return DevicePlan(device, off=True)  # MIG mode is off on this device already
    if stock.pinned:
        return DevicePlan(device, off=True, blockers=geometry.keys(stock.pinned))
    if stock.layout.blocked:
        sentence = f"device {device.index} has an instance that its table of profiles does not list"
        return DevicePlan(device, off=True, obstacle=sentence)
    going = changes(scene_of(device, geometry, stock, use, pool), 0)
    switch = (MigStep(Do.DISABLE, device.uuid, "MIG mode is on"),) if device.mig.current else ()
    return DevicePlan(device, steps=(*going, *switch), off=True)


def _to_auto(device: Device, use: DeviceUse, geometry: MigGeometry, stock: Stock, pool: Pool) -> DevicePlan:
    """The plan to layout auto: it destroys vgpud's idle instances. Afterwards requests make instances and
    releases destroy them.
    """
    own = geometry.state(key for key in pool.own if key in geometry.number)
    idle = stock.layout.slots & own & ~stock.pinned
    scene = scene_of(device, geometry, stock, use, pool)
    gone = [LayoutStep(False, key) for key in geometry.keys(idle)]
    staying = scene.parts.keys() - set(geometry.keys(idle))
    gone += [LayoutStep(False, key, part) for key in sorted(staying) for part in idle_parts(scene, pool, key)]
    going = [step_of(device, move, "no allocation holds it and no layout has it") for move in gone]
    last = () if use.count or not device.mig.current else (_release(device),)
    return DevicePlan(device, steps=(*going, *last))


def idle_parts(scene: Scene, pool: Pool, key: SlotKey) -> list[SlotKey]:
    """The compute instances in a divided GPU instance that vgpud made and that are neither allocated nor in
    use.
    """
    division = scene.parts[key]
    idle = division.geometry.keys(division.layout.slots & ~division.pinned)
    return [part for part in idle if (key, part) in pool.own_computes]


def _release(device: Device) -> MigStep:
    return MigStep(Do.RELEASE, device.uuid, "MIG mode goes back to what it was before vgpud")

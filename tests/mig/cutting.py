"""Runs MIG layouts within the test's process, on a fake device. The daemon can be cut at any point, as kill
-9 would cut it.

The device and the durable records survive a cut. Everything else is made anew.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.planner.cards import H200_PROFILES, h200
from vgpud.model.device import (
    ComputeInstance,
    DeviceProcess,
    GpuInstance,
    Mig,
    MigProfile,
    Node,
    Placement,
)
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.mig_view import MigTarget
from vgpud.model.rows import Row
from vgpud.model.tenancy import Mode, Selector
from vgpud.modes.base import Paths
from vgpud.modes.mig import MigMode, Wish
from vgpud.modes.mig_records import MigRecords
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.mig_layouts import MigLayouts
from vgpud.node.devices.transitions import Transitions
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.planner.geometry import ComputeKey, SlotKey, geometry_for
from vgpud.planner.layouts import spell
from vgpud.policy.model import Policy

T = TypeVar("T")
UUID = "GPU-0"
TABLE = geometry_for(H200_PROFILES)
PATHS = Paths(Path("/nowhere"), Path("/nowhere"), Path("/nowhere"), Path("/nowhere"))


def profile_of(key: SlotKey) -> MigProfile:
    return next(p for p in H200_PROFILES if p.id == key[0])


def whole_of(key: SlotKey) -> SlotKey:
    """The compute instance that covers a whole GPU instance."""
    part = max(profile_of(key).compute, key=lambda p: p.slice_count)
    return part.id, part.placements[0]


class WithoutThreads(asyncio.SelectorEventLoop):
    """An event loop that runs executor jobs in its own thread, for fakes that do not block."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as raised:
            future.set_exception(raised)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=WithoutThreads) as runner:
        return runner.run(main)


class Cut(BaseException):
    """Raised where the daemon is cut, in place of kill -9. It is no Exception, so vgpud's code does not catch
    it.
    """


@dataclass
class Scissors:
    """Counts the points at which the daemon may be cut, and cuts it at point number `at`. With None it cuts
    nowhere.
    """

    at: int | None = None
    passed: int = 0

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Cut


@dataclass
class Card:
    """A fake device with the NVML functions that vgpud uses. A GPU instance may lack its compute instance."""

    mode: bool = False
    instances: dict[int, GpuInstance] = field(default_factory=dict)
    processes_on: dict[SlotKey, int] = field(default_factory=dict)
    processes_in: dict[ComputeKey, int] = field(default_factory=dict)
    refuse: set[SlotKey] = field(default_factory=set)  # instances whose creation fails
    refuse_parts: set[ComputeKey] = field(default_factory=set)
    scissors: Scissors = field(default_factory=Scissors)
    made: int = 0
    touched: list[SlotKey] = field(default_factory=list)
    touched_parts: list[ComputeKey] = field(default_factory=list)

    def snapshot(self) -> Node:
        listed = tuple(sorted(self.instances.values(), key=lambda i: i.id)) if self.mode else ()
        mig = Mig(True, self.mode, self.mode, H200_PROFILES, listed)
        return Node(devices=(replace(h200(0), mig=mig, processes=self.processes(UUID)),))

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        there = {i.key: i for i in self.instances.values()}
        whole = [
            DeviceProcess(pid, None, "compute", there[key].id)
            for key, pid in self.processes_on.items()
            if key in there
        ]
        inside = [
            DeviceProcess(pid, None, "compute", there[key].id, one.id)
            for (key, part), pid in self.processes_in.items()
            if key in there and (one := there[key].compute(part)) is not None
        ]
        return (*whole, *inside)

    def gpu_instances(self, uuid: str) -> tuple[GpuInstance, ...]:
        return tuple(self.instances.values())

    def set_mig_mode(self, uuid: str, enabled: bool) -> bool:
        assert enabled or not self.instances, "MIG mode went off under instances"
        self.scissors.point()
        self.mode = enabled
        self.scissors.point()
        return True

    def create_gpu_instance(
        self, uuid: str, profile_id: int, placement: Placement, whole: bool = True
    ) -> GpuInstance:
        key = (profile_id, placement)
        self.scissors.point()
        if key in self.refuse:
            raise VgpuError(ErrorCode.NVML_FAILED, "told to fail", "")
        now = TABLE.state((i.profile_id, i.placement) for i in self.instances.values())
        assert self.mode, "an instance was made with MIG mode off"
        assert TABLE.free_after[now] >> TABLE.number[key] & 1, f"no room for {key} beside {TABLE.keys(now)}"
        self.made += 1
        number, slices = self.made, profile_of(key).slice_count
        self.instances[number] = GpuInstance(number, profile_id, placement, (), slices)
        self.touched.append(key)
        # the daemon may be cut when the GPU instance is made and its compute instance is not
        self.scissors.point()
        if whole:
            self._add(number, whole_of(key))
            self.scissors.point()
        return self.instances[number]

    def _add(self, number: int, part: SlotKey) -> None:
        instance = self.instances[number]
        ids = {one.id for one in instance.compute_instances}
        free = next(n for n in range(8) if n not in ids)
        one = ComputeInstance(free, part[0], f"MIG-{number}-{free}", part[1])
        self.instances[number] = replace(instance, compute_instances=(*instance.compute_instances, one))

    def create_compute_instance(self, uuid: str, gpu_instance_id: int, key: SlotKey) -> GpuInstance:
        instance = self.instances[gpu_instance_id]
        self.scissors.point()
        if (instance.key, key) in self.refuse_parts:
            raise VgpuError(ErrorCode.NVML_FAILED, "told to fail", "")
        geometry = geometry_for(profile_of(instance.key).compute)
        now = geometry.state(one.key for one in instance.compute_instances if one.key is not None)
        assert geometry.free_after[now] >> geometry.number[key] & 1, (
            f"no room for {key} beside {geometry.keys(now)}"
        )
        self._add(gpu_instance_id, key)
        self.touched_parts.append((instance.key, key))
        self.scissors.point()
        return self.instances[gpu_instance_id]

    def destroy_compute_instance(self, uuid: str, gpu_instance_id: int, compute_instance_id: int) -> None:
        instance = self.instances[gpu_instance_id]
        gone = next(one for one in instance.compute_instances if one.id == compute_instance_id)
        assert gone.key is not None
        if (instance.key, gone.key) in self.processes_in:
            raise VgpuError(ErrorCode.DEVICE_IN_USE, "the device is in use", "")
        self.scissors.point()
        left = tuple(one for one in instance.compute_instances if one is not gone)
        self.instances[gpu_instance_id] = replace(instance, compute_instances=left)
        self.touched_parts.append((instance.key, gone.key))
        self.scissors.point()

    def destroy_gpu_instance(self, uuid: str, gpu_instance_id: int) -> None:
        instance = self.instances[gpu_instance_id]
        key = instance.key
        if key in self.processes_on or any(on == key for on, _ in self.processes_in):
            raise VgpuError(ErrorCode.DEVICE_IN_USE, "the device is in use", "")
        self.scissors.point()
        self.instances[gpu_instance_id] = replace(instance, compute_instances=())
        # the daemon may be cut when the compute instance is destroyed and its GPU instance is not
        self.scissors.point()
        del self.instances[gpu_instance_id]
        self.touched.append(key)
        self.scissors.point()

    def place(self, keys: Iterable[SlotKey]) -> None:
        """Puts whole instances on the device. No point of `scissors` is passed, so the daemon is not cut."""
        self.mode = True
        for key in keys:
            self.made += 1
            self.instances[self.made] = GpuInstance(self.made, *key, (), profile_of(key).slice_count)
            self._add(self.made, whole_of(key))

    def place_parts(self, key: SlotKey, parts: Iterable[SlotKey]) -> None:
        """Puts a divided GPU instance on the device, without a point of `scissors`."""
        self.mode = True
        self.made += 1
        self.instances[self.made] = GpuInstance(self.made, *key, (), profile_of(key).slice_count)
        for part in parts:
            self._add(self.made, part)

    def parts(self) -> set[ComputeKey]:
        """The compute instances of divided GPU instances."""
        return {
            (i.key, one.key)
            for i in self.instances.values()
            for one in i.compute_instances
            if i.is_divided and one.key is not None
        }

    def keys(self) -> set[SlotKey]:
        return {(i.profile_id, i.placement) for i in self.instances.values()}


@dataclass
class Table:
    """Implements model.rows.Rows. The daemon can be cut before and after each write."""

    width: int
    kept: dict[Row, Row] = field(default_factory=dict)
    scissors: Scissors = field(default_factory=Scissors)
    changes: int = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(tuple(self.kept.values()))

    def get(self, *key: str) -> Row | None:
        return self.kept.get(key)

    async def put(self, row: Row) -> None:
        self.scissors.point()
        self.changes += 1
        self.kept[row[: self.width]] = row
        self.scissors.point()

    async def drop(self, *key: str) -> None:
        self.scissors.point()
        self.changes += 1
        self.kept.pop(key, None)
        self.scissors.point()


@dataclass
class Disk:
    """Durable records."""

    modes: Table = field(default_factory=lambda: Table(2))
    instances: Table = field(default_factory=lambda: Table(3))
    layouts: Table = field(default_factory=lambda: Table(1))

    @property
    def originals(self) -> list[Row]:
        """All records."""
        return [*self.modes, *self.instances, *self.layouts]

    def note(self, *rows: Row) -> "Disk":
        self.instances.kept |= {row: row for row in rows}
        return self

    def set_scissors(self, scissors: Scissors) -> None:
        self.modes.scissors = self.instances.scissors = self.layouts.scissors = scissors


class NoLedger:
    async def event(self, kind: EventKind, subject: str, sentence: str, user: int) -> Event:
        return Event(0, kind, subject, sentence, 0, user)

    async def events_after(self, revision: int, most: int) -> tuple[Event, ...]:
        return ()


class Node1:
    """The MIG parts of a daemon that has just started, with a given device and given records."""

    def __init__(self, card: Card, disk: Disk, rule: dict[str, Any] | None = None) -> None:
        self.card, self.disk, self.book = card, disk, Book()
        self.inventory = Inventory(card)  # type: ignore[arg-type]
        policy = Policy.model_validate({"device": [{"mode": "mig", **(rule or {})}]})
        loaded = SimpleNamespace(policy=policy)
        records = MigRecords(disk.instances, disk.layouts)
        self.mig = MigMode(card, disk.modes, records, PATHS, self._wish)  # type: ignore[arg-type]
        transitions = Transitions(
            {Mode.MIG: self.mig}, self.inventory, lambda uuid: bool(self.book.slices_on(uuid))
        )
        self.layouts = MigLayouts(
            self.mig,
            self.inventory,
            AllocationStore(NoLedger(), self.book),  # type: ignore[arg-type]
            transitions,
            lambda: loaded,  # type: ignore[arg-type,return-value]
            lambda point: card.scissors.point(),
        )

    def _wish(self, device_uuid: str) -> Wish:
        return self.layouts.pools.wish(device_uuid)

    def start(self) -> None:
        """Does the MIG part of vgpud's start without allocations (see node/recover.py)."""
        run(self._start())

    async def _start(self) -> None:
        await self.inventory.refresh()
        for place in sorted(self.layouts.own_instances()):
            await self.layouts.remove(place)
        await self.layouts.converge()

    def apply(self, *words: str) -> None:
        target = MigTarget(Selector(), tuple(words) or ("none",))
        run(self.layouts.apply((target,)))


def words_of(state: int) -> tuple[str, ...]:
    return spell(TABLE, TABLE.keys(state))


def cut(card: Card, disk: Disk, at: int | None) -> Scissors:
    card.scissors = Scissors(at)
    disk.set_scissors(card.scissors)
    return card.scissors


def cut_at_each_point(
    laid_out: tuple[Card, Disk], words: Iterable[str], draw: Random
) -> Iterator[tuple[int, Card, Disk]]:
    """Applies a layout and cuts vgpud at the plan's first point. Then does the same on a new device at the
    second point, and so on to the last. Yields the state after each cut and the start that follows it. That
    start is also cut at a random point, and then vgpud starts again.
    """
    for at in count(1):
        card, disk = deepcopy(laid_out)
        cut(card, disk, at)
        try:
            Node1(card, disk).apply(*words)
        except Cut:
            pass
        else:
            return  # the plan has fewer than `at` points, so it ran to its end
        cut(card, disk, draw.randint(1, 12))
        try:
            Node1(card, disk).start()
        except Cut:
            cut(card, disk, None)
            Node1(card, disk).start()
        yield at, card, disk

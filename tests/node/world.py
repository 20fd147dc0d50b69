"""A small node for tests of the keeper: fake devices, effectors that record their calls, and a real
ledger.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests import clock
from vgpud.hardware.engine_probe import EngineProbe
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.suspender import Suspender
from vgpud.inject.specs import Specs
from vgpud.lease.engines import EngineFiles
from vgpud.ledger import Durability, Ledger, RowTable
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device, Node
from vgpud.model.engine import Engine, EngineVerdict
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Edits, Isolation, Lifetime, Mode, Owner, Request, Slice
from vgpud.model.view import SliceMeter, SliceUse, Vitals
from vgpud.modes.preload import Preload
from vgpud.node.devices.drains import Drains
from vgpud.node.devices.engines import Engines
from vgpud.node.devices.inventory import Inventory
from vgpud.node.devices.policies import Policies
from vgpud.node.devices.transitions import Transitions
from vgpud.node.keeper import NodeKeeper
from vgpud.node.store.allocations import AllocationStore
from vgpud.node.store.book import Book
from vgpud.node.tenants.context import NodeContext
from vgpud.planner.use import is_open_to_others
from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import LoadedPolicy, load

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())
ALICE = Caller(Door.TENANT, 1000, 1000, Lifetime())
BOB = Caller(Door.TENANT, 1001, 1001, Lifetime())


class AbleProbe(EngineProbe):
    """A probe of devices whose driver can preempt tenants."""

    def ask(self, device_uuid: str, boot_id: str, driver_version: str) -> EngineVerdict:
        return EngineVerdict(Engine.CUT, "a kernel stood still", boot_id, driver_version)


def device(index: int, memory_gib: int = 80) -> Device:
    return Device(
        uuid=f"GPU-{index:08d}",
        index=index,
        name="Test GPU",
        memory_total_bytes=memory_gib * GIB,
        mps_capable=True,
        sm_count=100,
    )


@dataclass
class FakeGateway:
    node: Node = field(default_factory=lambda: Node(devices=(device(0), device(1))))
    error: VgpuError | None = None
    snapshots: int = 0
    vitals_of: dict[str, Vitals] = field(default_factory=dict)
    nvml: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(refusals={}))

    def vitals(self, uuid: str) -> Vitals:
        return self.vitals_of.get(uuid, Vitals())

    def snapshot(self) -> Node:
        self.snapshots += 1
        if self.error is not None:
            raise self.error
        return self.node


@dataclass
class Remembering:
    """An effector that keeps its state in memory and records its calls. A test can make it fail or wait."""

    mode: Mode
    attached: dict[tuple[str, str], Allocation] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    fail: set[str] = field(default_factory=set)
    pids: tuple[int, ...] = ()
    gate: asyncio.Event | None = None
    detach_gate: asyncio.Event | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise VgpuError(ErrorCode.HELPER_FAILED, f"{name} was told to fail", "")

    @property
    def suspendable(self) -> Any:
        return self if isinstance(self, Preload) else None

    async def verify(self, device: Device) -> str | None:
        return None

    async def apply(self, device: Device) -> None:
        self._called("apply")
        self.applied.add(device.uuid)

    async def resume(self, device: Device, part: Slice) -> None:
        self._called("resume")

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        if self.gate is not None:
            await self.gate.wait()
        self._called("attach")
        ready = device.uuid in self.applied or is_open_to_others(allocation, part)
        assert ready, "a slice was attached to a device that is not in its mode"
        self.attached[allocation.id, part.device_uuid] = allocation
        return part, Edits(env=(("CUDA_VISIBLE_DEVICES", part.device_uuid),))

    async def resize(self, allocation: Allocation) -> None:
        self._called("resize")
        for part in allocation.slices:
            self.attached[allocation.id, part.device_uuid] = allocation

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        if self.detach_gate is not None:
            await self.detach_gate.wait()
        self._called("detach")
        self.attached.pop((allocation.id, part.device_uuid), None)

    async def unapply(self, device_uuid: str) -> None:
        self._called("unapply")
        self.applied.discard(device_uuid)

    async def tenants(self, allocation: Allocation, part: Slice, soon: bool = False) -> tuple[int, ...]:
        self._called("tenants")
        return self.pids

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        self._called("use")
        return SliceUse(part.device_uuid, 1, self.pids)

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        self._called("meters")
        return tuple(SliceMeter(part.device_uuid, 1, len(self.pids)) for part in allocation.slices)


class Counted(Ledger):
    """A ledger whose writes take no simulated time."""

    async def _do(self, operation: Any, durability: Durability) -> Any:
        with clock.outside():
            return await super()._do(operation, durability)


@dataclass
class World:
    keeper: NodeKeeper
    parts: NodeContext
    ledger: Ledger
    gateway: FakeGateway
    effectors: dict[Mode, Remembering]
    folder: Path

    def specs(self) -> list[str]:
        return sorted(p.name for p in (self.folder / "cdi").glob("*.json"))

    def is_empty(self) -> bool:
        """Returns whether no trace of any allocation is left."""
        return not (
            len(self.parts.book)
            or self.specs()
            or any(e.attached or e.applied for e in self.effectors.values())
            or any(u.count for u in self.parts.book.use.values())
        )


def policy_of(folder: Path, text: str = "version = 1\n") -> Callable[[], LoadedPolicy]:
    path = folder / "vgpud.toml"
    path.write_text(text)
    paths = PolicyPaths(main=path, vendor_dir=None, run_dir=None, admin_dir=None)
    return lambda: load(paths)


def inventory_of(gateway: FakeGateway) -> Inventory:
    return Inventory(cast(Gateway, gateway))


@asynccontextmanager
async def world(
    folder: Path,
    gateway: FakeGateway | None = None,
    suspender: Suspender | None = None,
    preload: Remembering | None = None,
    policy: str = "version = 1\n",
) -> AsyncIterator[World]:
    gateway = gateway or FakeGateway()
    loader = policy_of(folder, policy)
    effectors: dict[Mode, Remembering] = {
        mode: Remembering(mode) for mode in Mode if mode is not Mode.UNMANAGED
    }
    if preload is not None:
        effectors[Mode.PRELOAD] = preload
    inventory = inventory_of(gateway)
    await inventory.refresh()
    book = Book()
    async with await Counted.open(folder / "ledger.db") as ledger:
        store = AllocationStore(ledger, book, checked=True)
        parts = NodeContext(
            drains=Drains(ledger.rows[RowTable.DRAINS]),
            store=store,
            inventory=inventory,
            policies=Policies(loader(), loader, store, inventory),
            transitions=Transitions(effectors, inventory, lambda u: bool(book.slices_on(u))),
            effectors=effectors,
            preload=preload if isinstance(preload, Preload) else None,
            specs=Specs(folder / "cdi"),
            fault=lambda point: None,
            engines=Engines(EngineFiles(folder), AbleProbe(Path(), folder), inventory, "a boot"),
            suspender=suspender or Suspender(Path("/usr/bin/false"), folder / "suspend.lock"),
        )
        keeper = NodeKeeper(parts)
        yield World(keeper, parts, ledger, gateway, effectors, folder)
        await keeper.close()


def request(name: str, gib: int = 4, **changes: Any) -> Request:
    base = Request(id=name, owner=Owner(1000, 1000), memory_bytes=gib * GIB, isolation=Isolation.QUOTA)
    return replace(base, **changes)

"""A keeper in memory for tests of vgpud's sockets. It has no ledger and no devices."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vgpud.model.caller import Caller
from vgpud.model.device import Device, Node, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event, EventKind
from vgpud.model.marks import Mark
from vgpud.model.mig_view import MigChange, MigDevice, MigFree, MigInstance, MigPlan, MigProcess, MigTarget
from vgpud.model.move_view import DefragView, Evacuation, RoomWanted, TenantMove
from vgpud.model.plan import Step, StepKind
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import (
    Allocation,
    Decision,
    Edits,
    Mode,
    Mount,
    Reason,
    Request,
    Selector,
    Slice,
    State,
    SuspendedProcess,
    Workload,
)
from vgpud.model.view import (
    ComputeTime,
    DeviceView,
    DrainView,
    Metered,
    MpsClient,
    MpsDaemon,
    MpsServer,
    NodeDescription,
    NodeProcess,
    ReloadReport,
    SliceMeter,
    SliceUse,
    Vitals,
)
from vgpud.policy.model import Policy

CARD = Device(uuid="GPU-1", index=0, name="Test card", memory_total_bytes=80 * GIB)
EDITS = Edits(
    env=(("VGPU_LEASE", "/run/vgpu"),),
    host_env=(("VGPU_LEASE", "/run/vgpud/leases/x"),),
    mounts=(Mount("/run/vgpud/leases/x", "/run/vgpu"),),
)


@dataclass(frozen=True)
class FakeLoaded:
    policy: Policy = field(default_factory=Policy)
    origins: Mapping[str, object] = field(default_factory=lambda: {"version": Path("/etc/p.toml")})
    files: tuple[Path, ...] = (Path("/etc/p.toml"),)
    digest: str = "abc"


class FakeMig:
    def __init__(self, keeper: "FakeKeeper") -> None:
        self._keeper = keeper

    async def devices(self) -> tuple[MigDevice, ...]:
        self._keeper._check()
        process = MigProcess(7, 1000, "python")
        instance = MigInstance(19, "1g.18gb", Placement(6, 1), 13, ("MIG-1",), True, False, "a1", (process,))
        return (MigDevice(CARD, None, "", True, (instance,), (MigFree("2g.35gb", 3),)),)

    async def preview(self, targets: Sequence[MigTarget]) -> MigPlan:
        self._keeper._check()
        change = MigChange("GPU-1", 0, "create", targets[0].layout[0], Placement(6, 1), "why")
        return MigPlan((change,))

    async def preview_defrag(self, selector: Selector) -> MigPlan:
        self._keeper._check()
        return MigPlan(refusal=VgpuError(ErrorCode.DEVICE_IN_USE, "pid 7 is there", "end it"))

    async def apply(self, targets: Sequence[MigTarget]) -> MigPlan:
        return await self.preview(targets)

    async def defrag(self, selector: Selector) -> MigPlan:
        return MigPlan()


class FakeMoves:
    def __init__(self, keeper: "FakeKeeper") -> None:
        self._keeper = keeper

    async def move(self, allocation_id: str, caller: Caller, to: Sequence[str], source: str) -> Allocation:
        self._keeper._check()
        held = self._keeper.get(allocation_id)
        slices = tuple(replace(part, device_uuid=uuid) for part, uuid in zip(held.slices, to, strict=True))
        self._keeper.held[allocation_id] = replace(held, slices=slices)
        return self._keeper.held[allocation_id]

    async def plan(self, wanted: RoomWanted) -> DefragView:
        self._keeper._check()
        return DefragView("GPU-2", (TenantMove("a1", "GPU-1", "GPU-2", 1 << 30),))

    async def defrag(self, wanted: RoomWanted, caller: Caller) -> DefragView:
        return await self.plan(wanted)

    async def evacuate(self, device_uuid: str, caller: Caller) -> Evacuation:
        return Evacuation((TenantMove("a1", device_uuid, "GPU-2", 1 << 30, True),), (("a2", "it is on MIG"),))


class FakeKeeper:
    """A fake of the keeper and of most of its parts. If `failure` is set, every call raises it. If `gate` is
    set, Allocate waits until the event is set.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.requests: list[Request] = []
        self.callers: list[Caller] = []
        self.forced: list[bool] = []
        self.held: dict[str, Allocation] = {}
        self.events: list[tuple[Event, Allocation | None]] = []
        self.oldest = 0
        self.watchers = 0
        self.reloads: list[bool] = []
        self.operated: list[tuple[object, ...]] = []
        self.loaded = FakeLoaded()
        self._changed = asyncio.Condition()
        self.book = self.store = self.policies = self.operations = self.allocates = self
        self.listings = self.meters = self.processes = self.residency = self.bypasses = self
        self.suspends = self.swaps = self

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def publish(self, kind: EventKind, held: Allocation) -> None:
        event = Event(len(self.events) + 1, kind, held.id, f"{held.id}: {kind.value}", 7)
        self.events.append((event, held))
        async with self._changed:
            self._changed.notify_all()

    async def allocate(self, request: Request, allocation_id: str | None = None) -> Allocation:
        self._check()
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        known = next((h for h in self.held.values() if h.request.id == request.id), None)
        if known is not None:
            return known
        part = Slice("GPU-1", Mode.PRELOAD, request.memory_bytes or 80 * GIB, request.share)
        held = Allocation(
            id=f"a{len(self.held) + 1}",
            request=request,
            state=State.ACTIVE,
            slices=(part,),
            reasons=(Reason("GPU-1", True, Mode.PRELOAD, "it fits"),),
            edits=EDITS,
            revision=len(self.events) + 1,
        )
        self.held[held.id] = held
        await self.publish(EventKind.ALLOCATION_ACTIVE, held)
        return held

    async def name(self, allocation_id: str, workload: Workload) -> None:
        held = self.held[allocation_id]
        self.held[allocation_id] = replace(held, request=replace(held.request, workload=workload))

    async def release(self, allocation_id: str, caller: Caller, force: bool) -> bool:
        self._check()
        self.callers.append(caller)
        self.forced.append(force)
        held = self.get(allocation_id)
        if not caller.may_touch(held.request.owner.uid):
            raise VgpuError(ErrorCode.NOT_OWNER, f"uid {caller.uid} does not own {allocation_id}", "ask it")
        del self.held[allocation_id]
        await self.publish(EventKind.ALLOCATION_RELEASED, held)
        return False

    async def resize(
        self, allocation_id: str, caller: Caller, memory_bytes: int | None, share: Percent | None
    ) -> Allocation:
        self._check()
        held = self.get(allocation_id)
        part = held.slices[0]
        part = replace(part, memory_bytes=memory_bytes or part.memory_bytes, share=share or part.share)
        self.held[allocation_id] = replace(held, slices=(part,))
        return self.held[allocation_id]

    async def pause(self, allocation_id: str, caller: Caller) -> Allocation:
        self._check()
        self.held[allocation_id] = replace(self.get(allocation_id), paused=True)
        return self.held[allocation_id]

    async def unpause(self, allocation_id: str, caller: Caller) -> Allocation:
        self._check()
        self.held[allocation_id] = replace(self.get(allocation_id), paused=False)
        return self.held[allocation_id]

    async def suspend(self, allocation_id: str, caller: Caller, deep: bool = False) -> Allocation:
        self._check()
        process = SuspendedProcess(17, 4711, 1 << 30)
        self.held[allocation_id] = replace(
            self.get(allocation_id), state=State.SUSPENDED, suspended=(process,)
        )
        return self.held[allocation_id]

    async def resume(self, allocation_id: str, caller: Caller) -> Allocation:
        self._check()
        self.held[allocation_id] = replace(self.get(allocation_id), state=State.ACTIVE, suspended=())
        return self.held[allocation_id]

    def get(self, allocation_id: str) -> Allocation:
        self._check()
        try:
            return self.held[allocation_id]
        except KeyError:
            raise VgpuError(
                ErrorCode.NO_SUCH_ALLOCATION, f"there is no allocation {allocation_id}", "see vgpuctl ls"
            ) from None

    def __iter__(self) -> Iterator[Allocation]:
        self._check()
        return iter(tuple(self.held.values()))

    @property
    def revision(self) -> int:
        return len(self.events)

    def marks(self, allocation: Allocation) -> tuple[Mark, ...]:
        return ()

    def memory_limit(self, allocation: Allocation) -> str:
        return "libvgpu"

    def standing(self, allocation: Allocation) -> str:
        return "waits for the test" if allocation.state is State.SUSPENDED else ""

    def stays(self, allocation: Allocation) -> tuple[tuple[str, int], ...]:
        return (("pools", 7),) if allocation.state is State.SUSPENDED else ()

    async def slice_use(self, allocation: Allocation) -> tuple[SliceUse, ...]:
        return (SliceUse("GPU-1", 5, (77,), 2, 6, 1, 0, ComputeTime(10, 8, 9, 3, 1)),)

    async def plan(self, request: Request) -> tuple[Decision, tuple[Step, ...]]:
        self._check()
        if request.count > 1:
            refusal = VgpuError(ErrorCode.IMPOSSIBLE, "2 devices are asked for, there is 1", "ask for 1")
            return Decision(refusal=refusal), ()
        part = Slice("GPU-1", Mode.PRELOAD, request.memory_bytes or 80 * GIB, request.share)
        return Decision(slices=(part,)), (Step(StepKind.ATTACH, "why", "GPU-1", Mode.PRELOAD, 0),)

    async def devices(self) -> tuple[tuple[DeviceView, ...], int]:
        self._check()
        return (DeviceView(CARD, "auto", Mode.PRELOAD, 3 * GIB, 1234, 1),), len(self.events)

    async def read(self, max_age_seconds: float = 0.0) -> Metered:
        self._check()
        return Metered(
            {"GPU-1": Vitals(41, 250_000, None, 87)},
            {"a1": (SliceMeter("GPU-1", 5, 1, 6, 1, 0, 7, ComputeTime(10, 8, 9, 3, 1)),)},
        )

    async def listed(self, metered: Metered, standing: object) -> tuple[NodeProcess, ...]:
        self._check()
        return (
            NodeProcess(77, 1000, "python train.py", "a1", "GPU-1", 0, 5, "preload", "x"),
            NodeProcess(78, None, "?", "", "GPU-1", 0, None),
        )

    async def last_events(self, count: int, user: int | None = None) -> tuple[Event, ...]:
        self._check()
        return tuple(event for event, _ in self.events if user in (None, event.user))[-count:]

    async def look(self) -> None:
        self._check()

    def describe(self) -> NodeDescription:
        self._check()
        return NodeDescription(Node(devices=(CARD,)), len(self.held), len(self.events), "abc", "well", 1.5)

    async def subscribe(self, after_revision: int | None) -> AsyncIterator[tuple[Event, Allocation | None]]:
        self._check()
        if after_revision is not None and after_revision < self.oldest:
            raise VgpuError(ErrorCode.BAD_REVISION, f"revision {after_revision} is not kept", "list anew")
        seen = len(self.events) if after_revision is None else after_revision
        self.watchers += 1
        try:
            while True:
                for item in self.events[seen:]:
                    seen = item[0].revision
                    yield item
                async with self._changed:
                    if len(self.events) == seen:
                        await self._changed.wait()
        finally:
            self.watchers -= 1

    @property
    def current(self) -> FakeLoaded:
        self._check()
        return self.loaded

    async def reload(self, dry_run: bool) -> ReloadReport:
        self._check()
        self.reloads.append(dry_run)
        return ReloadReport(True, "def", ("done",), ("waiting",))

    @property
    def mig(self) -> "FakeMig":
        return FakeMig(self)

    @property
    def moves(self) -> FakeMoves:
        return FakeMoves(self)

    @property
    def relocations(self) -> FakeMoves:
        return FakeMoves(self)

    async def mps(self) -> tuple[MpsDaemon, ...]:
        self._check()
        # the process that runs the test belongs to another user than these clients
        clients = (MpsClient(7, 5, 4242, "a", 1, "python secret.py"), MpsClient(8, 5, None, "", None, "x"))
        return (MpsDaemon("GPU-1", 0, 4, 0, False, 48, (MpsServer(5, 0, "FAULT"),), clients),)

    async def terminate(self, device_uuid: str, pid: int) -> None:
        self._check()
        self.operated.append(("terminate", device_uuid, pid))

    async def drain(self, device_uuid: str, drained: bool) -> DrainView:
        self._check()
        self.operated.append(("drain", device_uuid, drained))
        return DrainView(device_uuid, drained, ("a",), (9,))

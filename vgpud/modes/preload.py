"""Mode `preload`: a lease in shared memory, whose limits libvgpu enforces inside the tenant.

All slices of an allocation have one lease, so each attach writes the same lease. The arbiter registers the
tenant's processes. It keeps running when vgpud stops.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from vgpud import clock
from vgpud.hardware.nodes import device_nodes
from vgpud.lease import (
    USAGE_MOUNT,
    ArbiterClient,
    ContextCosts,
    DeviceLimits,
    LeaseActivity,
    LeaseMemory,
    LeaseSaves,
    Libraries,
    Meter,
    ProcessSwap,
    Registered,
    SharePolicy,
    UnknownCalls,
    Writers,
    close_lease,
    lease_home,
    note_moved,
    read_activity,
    read_counted,
    read_limits,
    read_meters,
    read_stays,
    read_swaps,
    read_unknown_calls,
    read_usage,
    remove_lease,
    update_limits,
    write_lease,
)
from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.journal import Message
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import WHOLE
from vgpud.model.tenancy import LEASE_VARIABLE, Allocation, Edits, Mode, Mount, Slice, State
from vgpud.model.view import SliceMeter, SliceUse
from vgpud.modes.base import Paths, Suspendable
from vgpud.modes.edits import cuda_env, driver_environment
from vgpud.modes.lease_meters import LeaseMeters
from vgpud.modes.walls import Walls
from vgpud.units import Units, UnitSpec

CONTAINER_LEASE = "/run/vgpu/lease"
CONTAINER_LIBRARY = "/run/vgpu/libvgpu.so"
ARBITER_UNIT = "vgpud-arbiter"

# Wait for processes to register with a restarted arbiter: libvgpu tries to reach it every 100 ms
# (RETRY_MS_MAX in arbiter_link.c).
_REGISTER_SECONDS = 0.25
# The longest wait for the notice of the arbiter's end after its connection broke. A killed process closes its
# sockets first and ends later: more than 0.2 s later on 2 cores at a load of 41. An arbiter that lives and
# cannot be reached is killed by `watch` within _HANG_SECONDS and a look.
_NOTICE_SECONDS = 10.0
# pause before a restart, so that an arbiter that dies at once is not restarted in a tight loop
_RESTART_SECONDS = 0.2
# Time that the event loop itself waits for the arbiter: a healthy arbiter answers in tens of microseconds,
# which is less than passing the order to a thread takes.
_AT_ONCE_SECONDS = 0.002
# If the arbiter does not answer for this time, vgpud takes it for hanging and kills it. systemd does so
# sooner (WatchdogSec=). Tenants do not decide by themselves that the arbiter hangs. In a test they did after
# 0.8 s without an answer: on 2 cores at a load of 25, 18 processes disconnected from a working arbiter 958
# times in 35 s, and lost waiting work.
_HANG_SECONDS = 6.0
_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
# After this time without an answer to an order, vgpud reports that the arbiter is silent; a listing does not
# wait longer.
_SILENCE_SECONDS = 1.0

# States in which the tenant's processes wait before their driver calls.
_AWAY = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)
_OUT = (State.SUSPENDING, State.SUSPENDED)
_PRIORITIES = {"above-normal": 1, "below-normal": -1}

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreloadRules:
    """The policy's rules for one device, as far as mode preload needs them."""

    share_policy: SharePolicy = SharePolicy.HARD
    evictable: bool = False  # allocations get memory that libvgpu can evict


@dataclass(frozen=True, slots=True)
class PreloadWorld:
    """Callbacks to the node: its allocations, and the policy's rules in force for a device (its UUID)."""

    allocations: Callable[[], Iterable[Allocation]]
    rules_for: Callable[[str], PreloadRules]
    # vgpud calls this before the arbiter learns of the device's first tenant
    settle_engine: Callable[[str], Awaitable[None]]
    forget_engine: Callable[[str], None]  # vgpud calls this after the device's last tenant
    context_mib: Callable[[str], int]  # the memory of a CUDA context on the device; 0: not known
    notice: Callable[[str], None]  # tells watchers a sentence on the arbiter


class Preload:
    mode = Mode.PRELOAD

    @property
    def suspendable(self) -> Suspendable:
        return self

    def __init__(
        self,
        units: Units,
        paths: Paths,
        world: PreloadWorld,
        walls: Walls,
        answer_seconds: float = _ANSWER_SECONDS,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        self._units = units
        self.walls = walls
        self._paths = paths
        self._leases = paths.leases
        self._world = world
        socket = paths.run_dir / "arbiter" / "control.sock"
        self._arbiter = ArbiterClient(socket)
        self._arbiter_at_once = ArbiterClient(socket, _AT_ONCE_SECONDS)
        self._arbiter_soon = ArbiterClient(socket, silence_seconds)
        self._arbiter_watched = ArbiterClient(socket, answer_seconds)
        self._silent_since: float | None = None
        # True after an order that the arbiter did not answer soon, until a check (`watch`) gets an answer
        self._is_silent = False
        self._listing = asyncio.Lock()
        self._contexts = ContextCosts()
        self._meters = LeaseMeters(self._leases)
        self._writers = Writers(self._leases)
        # allocations in a direct move: libvgpu parks their memory on its device while the driver moves the
        # rest
        self.parking: set[str] = set()
        self._libraries = Libraries()
        self._starting = asyncio.Lock()
        self._is_unwatched = asyncio.Event()  # cleared from the start of the arbiter to the notice of its end
        self._is_unwatched.set()
        self._restart: asyncio.Future[None] | None = None

    async def verify(self, device: Device) -> str | None:
        for needed in (self._paths.libvgpu, self._paths.arbiter):
            if not needed.exists():
                return f"{needed} is missing, so preload limits cannot be enforced"
        return None

    async def apply(self, device: Device) -> None:
        await self.ensure_arbiter()

    async def ensure_arbiter(self) -> None:
        """Starts the arbiter if it does not run. One arbiter serves all devices in mode preload."""
        if not self._is_unwatched.is_set():  # its death would have been reported
            return
        async with self._starting:
            if await asyncio.to_thread(self._units.running, ARBITER_UNIT) is None:
                await self._start_arbiter()
            if self._is_unwatched.is_set():
                self._is_unwatched.clear()
                self._units.on_exit(ARBITER_UNIT, self._ended)

    async def _start_arbiter(self) -> None:
        control = self._paths.run_dir / "arbiter" / "control.sock"
        spec = UnitSpec(
            name=ARBITER_UNIT,
            argv=(str(self._paths.arbiter), "--run-dir", str(self._paths.run_dir), "--foreground"),
            env=driver_environment(),
            ready=self._arbiter.ready,
            files=(control,),
        )
        await asyncio.to_thread(self._units.start, spec)
        if self._is_needed():
            log.info(LogEvent.ARBITER_RUNS_AGAIN, message_id=Message.ARBITER)
            self._world.notice("vgpu-arbiter runs again")
            await asyncio.sleep(_REGISTER_SECONDS)

    def _is_needed(self) -> bool:
        return any(not entry.name.startswith(".") for entry in self._leases.iterdir())

    def _ended(self, _: str) -> None:
        """Called when the arbiter has ended: starts it again if a lease exists. Meanwhile, libvgpu still
        enforces the limits, but a process of a tenant that ends keeps its slot in the lease.
        """
        self._is_unwatched.set()
        self._is_silent = False
        if self._is_needed():
            log.error(LogEvent.ARBITER_DIED_RESTARTING, message_id=Message.ARBITER)
            self._world.notice("vgpu-arbiter has ended: vgpud starts it again")
            self._restart = asyncio.ensure_future(self._start_again())

    async def _start_again(self) -> None:
        while self._is_needed():
            await asyncio.sleep(_RESTART_SECONDS)
            try:
                await self.ensure_arbiter()
            except VgpuError as error:
                log.error(LogEvent.ARBITER_START_FAILED, why=str(error), details=error.details)
            else:
                return

    async def watch(self) -> None:
        """Kills an arbiter that hangs; vgpud then starts it again (`_ended`). Runs until the daemon stops."""
        while True:
            await self.look_at_arbiter()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look_at_arbiter(self) -> None:
        if self._is_unwatched.is_set() or await self._answers():
            self._silent_since = None
            self._is_silent = False
        elif self._silent_since is None:
            self._silent_since = clock.now()
        elif clock.now() - self._silent_since >= _HANG_SECONDS:
            log.error(LogEvent.ARBITER_HANGS_RESTARTING, message_id=Message.ARBITER)
            self._world.notice(f"vgpu-arbiter did not answer for {_HANG_SECONDS:g} s: vgpud ends it")
            self._silent_since = None
            await asyncio.to_thread(self._units.stop, ARBITER_UNIT, 0.0)

    async def _answers(self) -> bool:
        return self._arbiter_at_once.ready() or await asyncio.to_thread(self._arbiter_watched.ready)

    def trouble(self) -> str:
        """What is wrong with the arbiter, as a sentence; empty if it answers."""
        if self._silent_since is None and not self._is_silent:
            return ""
        return (
            f"vgpu-arbiter does not answer: vgpud ends it after {_HANG_SECONDS:g} s and starts it again; "
            "tenants that are off their devices wait until then"
        )

    async def _order(
        self, order: Callable[[ArbiterClient, str], T], allocation_id: str, is_patient: bool = True
    ) -> T:
        """Lets the arbiter carry out an order. If the connection breaks, the arbiter is restarted first."""
        try:
            return await self._order_once(order, allocation_id, is_patient)
        except VgpuError as error:
            if not isinstance(error.__cause__, OSError) or error.code is not ErrorCode.HELPER_FAILED:
                raise
        try:
            async with asyncio.timeout(_NOTICE_SECONDS if is_patient else _SILENCE_SECONDS):
                await self._is_unwatched.wait()
        except TimeoutError:
            self._is_silent = True
        await self.ensure_arbiter()
        return await self._order_once(order, allocation_id, is_patient)

    async def _order_once(
        self, order: Callable[[ArbiterClient, str], T], allocation_id: str, is_patient: bool = True
    ) -> T:
        """Sends one order, which is idempotent. The event loop waits very briefly for the answer; if none
        comes, the order is sent again in a thread. If it is not answered soon, the arbiter's silence is
        reported, and a patient caller sends it once more.
        """
        try:
            return order(self._arbiter_at_once, allocation_id)
        except VgpuError as error:
            if error.code is not ErrorCode.HELPER_TIMEOUT:
                raise
        if not (is_patient and self._is_silent):
            try:
                return await asyncio.to_thread(order, self._arbiter_soon, allocation_id)
            except VgpuError as error:
                self._is_silent = error.code is ErrorCode.HELPER_TIMEOUT
                if not (is_patient and self._is_silent):
                    raise
        return await asyncio.to_thread(order, self._arbiter, allocation_id)

    async def resume(self, device: Device, part: Slice) -> None:
        """At the start of vgpud: restarts an arbiter that died while vgpud was stopped, and applies a changed
        policy. If the arbiter does not start, vgpud starts without it and tries again.
        """
        if self._restart is None or self._restart.done():
            try:
                await self.ensure_arbiter()
            except VgpuError as error:
                log.error(LogEvent.ARBITER_START_FAILED, why=str(error), details=error.details)
                self._restart = asyncio.ensure_future(self._start_again())
        self.follow_rules(device.uuid)
        for allocation in self._world.allocations():
            if any(held.device_uuid == device.uuid for held in allocation.slices):
                self._writers.hold(allocation.id)
                self._libraries.hold(self._paths.libvgpu)
                await self.restore_wall(allocation)

    async def restore_wall(self, allocation: Allocation) -> None:
        """Adjusts the memory wall to the allocation. If the driver refuses, the reason is logged."""
        try:
            await self.walls.keep(allocation)
        except VgpuError as error:
            why = f"{error}; the memory wall may not be in step with the allocation"
            log.warning(LogEvent.CGROUP_DEVICE_MEMORY_LIMIT_NOT_ADJUSTED, allocation=allocation.id, why=why)

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        # for a slice in a MIG instance, no earlier `apply` has started the arbiter
        await self.ensure_arbiter()
        if part.mode is Mode.PRELOAD and part.mig is None:
            # The engine of a device is chosen for its first tenant, which this tenant may be.
            await self._world.settle_engine(device.uuid)
            self._contexts.note(device.uuid, self._world.context_mib(device.uuid))
        owner, limits = allocation.request.owner, self._limits(allocation)
        if (self._leases / allocation.id).exists():
            await note_moved(self._leases / allocation.id, [device.uuid for device in limits])
        links = await self._order(ArbiterClient.follows_links, allocation.id)
        lease = write_lease(
            lease_home(self._leases, allocation.id, allocation.request.counts_for.uid, links),
            allocation.id,
            limits,
            uid=owner.uid,
            gid=owner.gid,
            away=allocation.state in _AWAY or allocation.starts_suspended,
            memory=self._memory(allocation),
            paused=allocation.paused,
        )
        self._writers.hold(allocation.id)
        self._libraries.hold(self._paths.libvgpu)
        self._contexts.seed(self._leases / allocation.id)
        await self._order(ArbiterClient.add, allocation.id)
        await self.walls.build(allocation)
        nodes = device_nodes(device, part.mig, self._paths.host_root)
        return part, self._edits(allocation, lease).merged(Edits(device_nodes=nodes))

    def _edits(self, allocation: Allocation, lease: Path) -> Edits:
        return Edits(
            env=(*cuda_env(allocation), ("LD_PRELOAD", CONTAINER_LIBRARY)),
            host_env=((LEASE_VARIABLE, str(lease)), ("LD_PRELOAD", str(self._paths.libvgpu))),
            mounts=(
                # The lease is mounted read-only, because a container's root could otherwise change the
                # limits. Its file `usage` is mounted beside it, not below it (native/common/lease.h).
                Mount(str(lease), CONTAINER_LEASE),
                Mount(str(lease / "usage"), USAGE_MOUNT, read_only=False),
                Mount(str(self._paths.libvgpu), CONTAINER_LIBRARY),
            ),
        )

    async def resize(self, allocation: Allocation) -> None:
        folder = self._leases / allocation.id
        away = allocation.state in _AWAY
        memory, paused = self._memory(allocation), allocation.paused
        saves = LeaseSaves.REST if allocation.is_deep else LeaseSaves.NOTHING
        if allocation.id in self.parking:
            saves = LeaseSaves.PARKED
        update_limits(folder, self._limits(allocation), away=away, memory=memory, paused=paused, saves=saves)
        await self.walls.keep(allocation)
        # a process that does not get the order now reads the lease when it registers
        with suppress(VgpuError):
            await self.look(allocation.id)

    async def pause(self, allocation_id: str, paused: bool) -> None:
        """Orders the arbiter to keep the tenant off its devices, or to let it run again. Raises VgpuError."""
        folder = self._leases / allocation_id
        update_limits(folder, read_limits(folder).devices, paused=paused)
        # `add` makes the arbiter read the limits of a lease that it serves already
        await self._order(ArbiterClient.add, allocation_id)

    def is_pause_ordered(self, allocation_id: str) -> bool:
        """True if the lease orders the tenant's pause. Raises VgpuError(LEASE_FAILED)."""
        return read_limits(self._leases / allocation_id).paused

    async def look(self, allocation_id: str) -> None:
        await self._order_once(ArbiterClient.look, allocation_id)

    def registered(self, allocation_id: str) -> Registered:
        """The arbiter's state of the lease. Blocks. Raises VgpuError HELPER_FAILED or HELPER_TIMEOUT."""
        return self._arbiter.registered(allocation_id)

    def learn(self, allocation_id: str) -> None:
        """Makes the tenant's processes measure again how much memory the driver itself takes. Blocks. Raises
        VgpuError.
        """
        self._arbiter.look(allocation_id)

    def counted(self, allocation: Allocation) -> tuple[int, ...]:
        """Bytes that libvgpu counts for each slice of the allocation. Raises VgpuError(LEASE_FAILED)."""
        return read_counted(self._leases / allocation.id, len(allocation.slices))

    def unknown_calls(self, allocation_id: str) -> UnknownCalls:
        """The driver calls of the tenant that libvgpu does not know. Raises VgpuError(LEASE_FAILED)."""
        return read_unknown_calls(self._leases / allocation_id)

    def _memory(self, allocation: Allocation) -> LeaseMemory:
        """Where libvgpu must keep the tenant's memory. Memory is evictable (not FIXED) only if the policy
        says so, and only for an allocation on a single device: with several devices, peers would map the
        memory too. While the driver has saved the tenant's processes, libvgpu keeps their memory out.
        """
        if allocation.is_deep:
            return LeaseMemory.OUT
        if allocation.is_swapped:
            return LeaseMemory.OUT if allocation.state in _OUT else LeaseMemory.HERE
        parts = allocation.slices
        alone = len(parts) == 1 and parts[0].mode is Mode.PRELOAD and parts[0].mig is None
        evictable = alone and self._world.rules_for(parts[0].device_uuid).evictable
        return LeaseMemory.HERE if evictable else LeaseMemory.FIXED

    def expect(self, allocation_id: str, soon: bool) -> None:
        folder = self._leases / allocation_id
        held, wanted = read_limits(folder), LeaseMemory.SOON if soon else LeaseMemory.HERE
        if (
            not held.away
            and held.memory in (LeaseMemory.HERE, LeaseMemory.SOON)
            and held.memory is not wanted
        ):
            update_limits(folder, held.devices, memory=wanted)

    def keep(self, allocation_id: str, share_hundredths: int) -> None:
        folder = self._leases / allocation_id
        held = read_limits(folder)
        if held.keep_share != share_hundredths:
            update_limits(folder, held.devices, keep_share=share_hundredths)

    def swaps(self, allocation_id: str) -> tuple[ProcessSwap, ...]:
        return read_swaps(self._leases / allocation_id)

    def stays(self, allocation_id: str) -> tuple[int, ...]:
        return read_stays(self._leases / allocation_id)

    def held(self, allocation_id: str) -> Meter:
        return read_meters(self._leases / allocation_id, 1)[0].memory

    def activity(self, allocation_id: str) -> LeaseActivity:
        return read_activity(self._leases / allocation_id)

    def _limits(self, allocation: Allocation) -> tuple[DeviceLimits, ...]:
        return limits_of(allocation, self._world.rules_for)

    def follow_rules(self, device_uuid: str = "") -> None:
        """Applies the present rules to all tenants, or to those of one device, whose leases have earlier
        rules.
        """
        for allocation in self._world.allocations():
            parts = [part for part in allocation.slices if device_uuid in ("", part.device_uuid)]
            lease = self._leases / allocation.id
            if not any(part.mode is Mode.PRELOAD for part in parts) or not lease.exists():
                continue
            try:
                self._follow(allocation)
            except VgpuError as error:
                why = f"{error}; the tenant keeps its earlier rules"
                log.error(LogEvent.POLICY_RULES_NOT_APPLIED_TO_TENANT, allocation=allocation.id, why=why)

    def _follow(self, allocation: Allocation) -> None:
        """Writes the present rules into a lease. Other values stay as they are, because a resize may have
        changed the book and not yet the lease.
        """
        folder = self._leases / allocation.id
        held = read_limits(folder)
        ruled = tuple(
            replace(device, share_policy=now.share_policy, priority=now.priority)
            for device, now in zip(held.devices, self._limits(allocation), strict=True)
        )
        memory = held.memory if held.away else self._memory(allocation)
        if (ruled != held.devices or memory is not held.memory) and not held.closed:
            update_limits(folder, ruled, memory=memory)

    async def serve_anew(self, allocation_ids: Sequence[str]) -> None:
        """Makes the arbiter read the engine of the allocations' devices again: it reads the engine when it
        gets the device's first lease. Raises VgpuError.
        """
        await self.ensure_arbiter()
        for order in (ArbiterClient.remove, ArbiterClient.add):
            for allocation_id in allocation_ids:
                await self._order(order, allocation_id)

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        self._writers.hold(allocation.id)
        close_lease(self._leases / allocation.id)
        with suppress(VgpuError):  # if the arbiter does not run, it will read all leases at its start
            await self._order_once(ArbiterClient.remove, allocation.id)
        self._contexts.learn(self._leases / allocation.id)
        self._meters.forget(allocation.id)
        await self.walls.drop(allocation)
        await remove_lease(self._leases, allocation.id)
        self._writers.drop(allocation.id)

    async def unapply(self, device_uuid: str) -> None:
        """Forgets the engine of the device. The arbiter keeps running: it serves every device in mode
        preload, and costs little while idle.
        """
        self._world.forget_engine(device_uuid)

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        folder = self._leases / allocation.id
        usage = read_usage(folder)
        if part.target not in self._contexts:
            self._contexts.learn(folder)
        ordinal = [s.target for s in allocation.slices].index(part.target)
        meter = usage.device(ordinal)
        return SliceUse(
            device_uuid=part.device_uuid,
            memory_used_bytes=meter.used_bytes + meter.context_bytes,
            memory_driver_bytes=meter.context_bytes,
            memory_peak_bytes=meter.peak_bytes,
            refusals_limit=meter.refusals_limit,
            refusals_card=meter.refusals_card,
            pids=await self._tenants_seen(allocation, part),
            compute=read_meters(folder, ordinal + 1)[ordinal].compute,
        )

    async def _tenants_seen(self, allocation: Allocation, part: Slice) -> tuple[int, ...]:
        """The processes in the slice; none if the arbiter does not answer soon."""
        try:
            return await self.tenants(allocation, part, soon=True)
        except VgpuError as error:
            if error.code is not ErrorCode.HELPER_TIMEOUT:
                raise
            return ()

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        return self._meters.read(allocation, [device.memory_total_bytes for device in devices])

    async def tenants(self, allocation: Allocation, part: Slice, soon: bool = False) -> tuple[int, ...]:
        if not soon:
            return await self._registered(allocation.id, is_patient=True)
        # Listings ask one after the other, so that all of them wait for one missing answer only.
        async with self._listing:
            if self._is_silent:
                raise VgpuError(ErrorCode.HELPER_TIMEOUT, self.trouble(), "try again when it answers")
            return await self._registered(allocation.id, is_patient=False)

    async def _registered(self, allocation_id: str, is_patient: bool) -> tuple[int, ...]:
        # If the arbiter is being started, waits for the end of the start: until then it has no registered
        # processes to list.
        async with self._starting:
            pass
        return await self._order(ArbiterClient.list, allocation_id, is_patient)


def limits_of(allocation: Allocation, rules_for: Callable[[str], PreloadRules]) -> tuple[DeviceLimits, ...]:
    """The device limits for an allocation's lease: one entry for each slice, in order."""
    priority = allocation.request.priority
    return tuple(_device_limits(part, priority, rules_for(part.device_uuid)) for part in allocation.slices)


def _device_limits(part: Slice, priority: str, rules: PreloadRules) -> DeviceLimits:
    # in mode mps, MPS enforces share and priority, and the lease only the memory
    if part.mode is not Mode.PRELOAD:
        return DeviceLimits(part.target, part.memory_bytes)
    return DeviceLimits(
        uuid=part.target,
        memory_bytes=part.memory_bytes,
        share_hundredths=(part.share or WHOLE).hundredths,
        share_policy=rules.share_policy if part.share else SharePolicy.NONE,
        priority=_PRIORITIES.get(priority, 0),
    )

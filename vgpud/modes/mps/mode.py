"""The effector of mode `mps`: one supervised control daemon for each device or MIG device, tenants of any
size.

The daemon grants every client the limits of its largest tenant, and a client can only lower them. So the
guard in each process (native/guard) reads the tenant's limits from a file that root owns, gives each process
a part of them, and refuses cuInit if no daemon answers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from vgpud import clock
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.lease import Libraries
from vgpud.model.device import ComputeMode, Device, DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import WHOLE, Percent
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice, State
from vgpud.model.view import MpsDaemon, SliceMeter, SliceUse
from vgpud.modes.base import Paths, remember
from vgpud.modes.gpu_use import (
    AllocationNames,
    GpuUse,
    allocation_of,
    foreign_processes,
    meter_of,
    slice_processes,
)
from vgpud.modes.mps.edits import mps_edits, with_libvgpu
from vgpud.modes.mps.features import Features, probe
from vgpud.modes.mps.folders import (
    DeviceFolder,
    inner_folder,
    remove_tenant,
    tenant_folder,
    write_tenant,
)
from vgpud.modes.mps.report import report
from vgpud.modes.mps.rules import MpsLimits, MpsWorld, Users
from vgpud.modes.mps.supervisor import Charge, Supervisor, unit_name
from vgpud.modes.preload import Preload
from vgpud.proc import is_ending
from vgpud.units import Units

log = structlog.get_logger(__name__)

ORIGINAL_KEY = "compute_mode"
_LEAVING_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_AMPERE = (8, 0)
_HELD = (State.ACTIVE, State.FAILED, State.RESIZING)


class MpsMode(GpuUse):
    mode = Mode.MPS
    suspendable = None

    def __init__(
        self, gateway: Gateway, units: Units, world: MpsWorld, paths: Paths, leases: Preload
    ) -> None:
        """`leases` is the effector of mode preload, for tenants whose memory libvgpu or the driver limits."""
        super().__init__(gateway)
        self._units = units
        self._world = world
        self._paths = paths
        self._leases = leases
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._names = AllocationNames()
        self._libraries = Libraries()

    # --- the protocol of effectors

    async def verify(self, device: Device) -> str | None:
        unable = self._unable(device, self._world.rules_for(device.uuid).exclusive_process)
        if unable is not None:
            return unable
        if self._world.rules_for(device.uuid).partitions and not self._divides(device):
            return f"{self._paths.mps_control} or the device has no static SM partitions (branch 590, Ampere)"
        held = any(a.state in _HELD for a in self._world.allocations_on(device.uuid))
        if held or await asyncio.to_thread(self._units.running, unit_name(device.uuid)) is not None:
            return None
        return await foreign_processes(self._gateway, device)

    def _unable(self, device: Device, closed_by_driver: bool) -> str | None:
        """Why the device cannot serve MPS, or None. `closed_by_driver`: compute mode EXCLUSIVE_PROCESS keeps
        programs from bypassing MPS.
        """
        if not device.mps_capable:
            return "it does not support MPS"
        if not self._guard.exists() and not closed_by_driver:
            return f"{self._guard} is missing, so a tenant could run past a dead control daemon"
        if not self.features().memory_limits:
            return f"{self._paths.mps_control} is missing, or too old to limit memory (before 11.5)"
        return None

    def _divides(self, device: Device) -> bool:
        return self.features().partitions and (device.compute_capability or (0, 0)) >= _AMPERE

    async def apply(self, device: Device) -> None:
        await self._close_compute_mode(device)
        await self._supervisor(device.uuid, device.uuid).up()

    async def resume(self, device: Device, part: Slice) -> None:
        """Continues with a slice at the start of vgpud. A daemon that does not answer is watched too; the
        health checks then decide what to do.
        """
        supervisor = self._supervisor(part.target, device.uuid)
        try:
            await supervisor.up()
        except VgpuError as error:
            self._world.notice(part.target, str(error))
            supervisor.watch()
        for allocation in self._world.allocations_on(part.target):
            await self._leases.restore_wall(allocation)

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        refusal = self.closed_to(allocation.request.owner.uid, device, part.target, allocation.id)
        if refusal is not None:
            raise VgpuError(
                ErrorCode.DENIED_BY_POLICY,
                f"device {device.index}: {refusal}",
                "name another device, or set mps.users to 'multi' or 'queue' in the policy",
            )
        rules = self._world.rules_for(part.device_uuid)
        self._say_who_waits(allocation, part.target)
        supervisor = self._supervisor(part.target, part.device_uuid)
        if part.is_on_top:  # for a slice in a MIG instance, no earlier `apply` has started the daemon
            await self._up_on_top(device, supervisor)
        place = tenant_folder(self._paths.run_dir, allocation.id)
        tenant = write_tenant(place, part, rules, allocation.request.owner.uid)
        await supervisor.limit()
        nodes = device_nodes(device, part.mig, self._paths.host_root)
        folder = DeviceFolder.of(self._paths.run_dir, part.target)
        self._libraries.hold(self._guard)
        edits = mps_edits(allocation, part, folder, tenant, self._guard, rules, nodes)
        if rules.pooled_memory:
            _, lease = await self._leases.attach(allocation, part, device)
            edits = with_libvgpu(edits, lease)
        await self._leases.walls.build(allocation)
        return part, edits

    async def _up_on_top(self, device: Device, supervisor: Supervisor) -> None:
        """Starts the daemon of a MIG device. Compute modes exist for whole cards only, so on a MIG device
        only the guard prevents a bypass of MPS.
        """
        unable = self._unable(device, closed_by_driver=False)
        if unable is not None:
            raise VgpuError(
                ErrorCode.UNSUPPORTED,
                f"no MPS on an instance of device {device.index}: {unable}",
                "install what is missing, or ask for isolation quota",
            )
        await supervisor.up()

    async def resize(self, allocation: Allocation) -> None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} is held by MPS, whose limits are fixed when a process starts",
            "allocate again with the other size and release this one",
        )

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        await self._leases.walls.drop(allocation)
        await remove_tenant(tenant_folder(self._paths.run_dir, allocation.id))
        # The allocation has a lease if libvgpu limits its memory, also if the attach was interrupted.
        if (self._paths.leases / allocation.id).exists():
            await self._leases.detach(allocation, part)
        if not self._world.slices_on(part.target):
            if part.is_on_top and part.target:
                await self.unapply(part.target)
            return
        try:
            await self._supervisor(part.target, part.device_uuid).limit()
        except VgpuError as error:
            # a release does not wait for a hung daemon; the health checks end that daemon
            why = f"{error}; the limits from before the release stay"
            log.warning(LogEvent.MPS_LIMITS_NOT_LOWERED, device=part.target, why=why)

    async def unapply(self, device_uuid: str) -> None:
        """Stops the daemon of a device or of a MIG device, and restores the compute mode."""
        await self._supervisor(device_uuid, device_uuid).down()
        await self._servers_gone(device_uuid)
        await self._restore_compute_mode(device_uuid)
        self._supervisors.pop(device_uuid, None)

    async def _servers_gone(self, device_uuid: str) -> None:
        """Waits until an ended server has left the card: until then NVML would list it as a foreign program.
        The wait is bounded, and ends if NVML cannot list the processes.
        """
        end = clock.now() + _LEAVING_SECONDS
        while clock.now() < end:
            try:
                listed = await asyncio.to_thread(self._gateway.processes, device_uuid)
            except VgpuError:
                return
            if not any(is_ending(process.pid) for process in listed):
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        if allocation.has_lease:
            return await self._leases.use(allocation, part, device)
        return await super().use(allocation, part, device)

    def meters(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[SliceMeter, ...]:
        pairs = zip(allocation.slices, devices, strict=True)
        return tuple(
            meter_of(part, (p for p in device.processes if self._names.of(p.pid) == allocation.id))
            for part, device in pairs
        )

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        """The slice's processes. NVML lists the processes of all tenants of the device, and each has its
        allocation's id in its environment.
        """
        listed = await slice_processes(self._gateway, part)
        return tuple(p for p in listed if allocation_of(p.pid) == allocation.id)

    # --- which users a device serves

    def closed_to(self, uid: int, device: Device, target: str, but: str = "") -> str | None:
        """Why a user cannot have a share on the device now, or None. The allocation `but` is ignored."""
        others = [a for a in self._world.allocations_on(target) if a.id != but]
        rules = self._world.rules_for(device.uuid)
        most = self._client_limit(device, target)
        if (len(others) + 1) * rules.processes_per_tenant > most:
            return (
                f"its MPS server takes {most} processes, and {len(others)} tenants may have "
                f"{rules.processes_per_tenant} each"
            )
        uids = self._other_users(uid, target, but)
        if not uids or rules.users is Users.QUEUE:
            return None
        names = ", ".join(map(str, uids))
        return f"its MPS server serves uid {names}, and uid {uid} would wait until all their programs end"

    def _client_limit(self, device: Device, target: str) -> int:
        """The maximum of clients of a daemon. In a MIG device it depends on the compute instance (MPS guide,
        "client limits").
        """
        most = self.features().client_limit(device.compute_capability)
        if target == device.uuid:
            return most
        slices = {p.id: p.slice_count for p in device.mig.profiles}
        of_instance = (
            compute.placement.size
            if instance.is_divided and compute.placement is not None
            else slices.get(instance.profile_id, 1)
            for instance in device.mig.instances
            for compute in instance.compute_instances
            if compute.uuid == target
        )
        return max(most * next(of_instance, 1) // max(slices.values(), default=1), 1)

    def _say_who_waits(self, allocation: Allocation, target: str) -> None:
        uid = allocation.request.owner.uid
        others = self._other_users(uid, target, allocation.id)
        if others:
            names = ", ".join(map(str, others))
            self._world.notice(
                target, f"programs of uid {uid} wait while any of uid {names} run: one user at a time"
            )

    def _other_users(self, uid: int, target: str, but: str) -> tuple[int, ...]:
        """The uids of other users on the daemon, whose programs would block those of `uid`; none under a
        multi-user server.
        """
        if self._is_multi_user(target):
            return ()
        owners = {a.request.owner.uid for a in self._world.allocations_on(target) if a.id != but}
        return tuple(sorted(owners - {uid}))

    def _is_multi_user(self, target: str) -> bool:
        supervisor = self._supervisors.get(target)
        return supervisor is not None and supervisor.multi_user

    # --- for operators

    def features(self) -> Features:
        return probe(self._paths.mps_control)

    async def report(self, device: Device) -> tuple[MpsDaemon, ...]:
        """The control daemons of the device and of its MIG devices."""
        found = await asyncio.gather(*(self._report(device, target) for target in self._targets(device)))
        return tuple(daemon for daemon in found if daemon is not None)

    def _targets(self, device: Device) -> tuple[str, ...]:
        on_top = (t for t, s in self._supervisors.items() if s.charge.owner_uuid == device.uuid)
        return tuple(dict.fromkeys((device.uuid, *on_top)))

    async def _report(self, device: Device, target: str) -> MpsDaemon | None:
        running = await asyncio.to_thread(self._units.running, unit_name(target))
        if running is None:
            return None
        supervisor = self._supervisor(target, device.uuid)
        processes = await asyncio.to_thread(self._gateway.processes, device.uuid)
        said = await asyncio.to_thread(
            report,
            device,
            running.pid,
            supervisor.control(),
            self.features(),
            processes,
            supervisor.multi_user,
        )
        return replace(said, device_uuid=target, client_limit=self._client_limit(device, target))

    async def terminate(self, device: Device, pid: int) -> None:
        """Ends the work of one MPS client; the other clients continue. Raises VgpuError: NO_SUCH_CLIENT,
        MPS_REFUSED.
        """
        seen = 0
        for target in self._targets(device):
            if await asyncio.to_thread(self._units.running, unit_name(target)) is None:
                continue
            control = self._supervisor(target, device.uuid).control()
            listed = await asyncio.to_thread(control.clients)
            client = next((c for c in listed if c.pid == pid), None)
            if client is not None:
                await asyncio.to_thread(control.terminate_client, client.server_pid, pid)
                return
            seen += len(listed)
        raise VgpuError(
            ErrorCode.NO_SUCH_CLIENT,
            f"no MPS client with pid {pid} among the {seen} on device {device.index}",
            "see 'vgpuctl mps ls'",
        )

    # --- helper methods

    @property
    def _guard(self) -> Path:
        return self._paths.libvgpu.with_name("libvgpu-guard.so")

    def _supervisor(self, target: str, device_uuid: str) -> Supervisor:
        found = self._supervisors.get(target)
        if found is None:
            world = self._world
            charge = Charge(
                device_uuid=target,
                owner_uuid=device_uuid,
                program=self._paths.mps_control,
                folder=DeviceFolder.of(self._paths.run_dir, target),
                features=self.features,
                rules=lambda: world.rules_for(device_uuid),
                limits=lambda: MpsLimits.largest(world.slices_on(target)),
                tenants=lambda: world.users_on(target),
                died=lambda sentence: self._died(target, device_uuid, sentence),
                notice=partial(world.notice, target),
                shares=partial(self._shares, target),
            )
            found = self._supervisors[target] = Supervisor(charge, self._units)
        return found

    def _shares(self, target: str) -> dict[Path, Percent]:
        """The shares of a daemon's tenants, by the folder that the guard of each reads."""
        return {
            inner_folder(
                tenant_folder(self._paths.run_dir, allocation.id), allocation.request.owner.uid
            ): part.share or WHOLE
            for allocation in self._world.allocations_on(target)
            for part in allocation.slices
            if part.target == target and part.mode is Mode.MPS
        }

    def _died(self, target: str, device_uuid: str, sentence: str) -> None:
        held = frozenset(a.id for a in self._world.allocations_on(target))
        self._world.died(target, sentence)
        task = asyncio.ensure_future(self._log_lost(device_uuid, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _log_lost(self, device_uuid: str, held: frozenset[str]) -> None:
        """Logs the clients that died with the daemon. It must run while NVML still lists them."""
        try:
            processes = await asyncio.to_thread(self._gateway.processes, device_uuid)
        except VgpuError as error:
            log.warning(LogEvent.MPS_LOST_CLIENTS_UNKNOWN, device=device_uuid, why=str(error))
            return
        named = {p.pid: allocation_of(p.pid) for p in processes if p.kind != "graphics"}
        lost = {pid: name for pid, name in named.items() if name in held}
        if lost:
            log.error(LogEvent.MPS_CLIENTS_LOST, device=device_uuid, allocation_by_pid=lost)

    async def _close_compute_mode(self, device: Device) -> None:
        """Sets compute mode EXCLUSIVE_PROCESS. A program that bypasses MPS then gets no context, whether it
        loads the guard or not.
        """
        wanted = self._world.rules_for(device.uuid).exclusive_process
        if not wanted or device.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
            return
        await remember(self._world.originals, device.uuid, ORIGINAL_KEY, device.compute_mode.value)
        await asyncio.to_thread(self._gateway.set_compute_mode, device.uuid, ComputeMode.EXCLUSIVE_PROCESS)

    async def _restore_compute_mode(self, device_uuid: str) -> None:
        original = self._world.originals.get(device_uuid, ORIGINAL_KEY)
        if original is None:
            return
        await asyncio.to_thread(self._gateway.set_compute_mode, device_uuid, ComputeMode(original[-1]))
        await self._world.originals.drop(device_uuid, ORIGINAL_KEY)

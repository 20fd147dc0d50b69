"""The effector of mode `mps`: one supervised control daemon a device, tenants of any size on it.

A client may only lower what the daemon grants, and the daemon grants what its largest tenant holds; in
between, the guard in each tenant's process takes the tenant's own limits from a file of root's, hands
each process a part of them, and refuses cuInit when no daemon answers (native/guard).
"""

import asyncio
from pathlib import Path

import structlog

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import ComputeMode, Device, DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice, State
from vgpud.model.view import MpsDaemon, SliceUse
from vgpud.modes.base import Paths
from vgpud.modes.gpu_use import allocation_of, foreign_processes, pids_of, slice_processes, use_of
from vgpud.modes.mps.edits import mps_edits
from vgpud.modes.mps.features import Features, probe
from vgpud.modes.mps.folders import DeviceFolder, remove_tenant, tenant_folder, write_tenant
from vgpud.modes.mps.report import report
from vgpud.modes.mps.rules import Limits, MpsWorld, Users
from vgpud.modes.mps.supervisor import Charge, Supervisor, unit_name
from vgpud.units import Units

log = structlog.get_logger(__name__)

ORIGINAL_KEY = "compute_mode"
_HELD = (State.ACTIVE, State.FAILED, State.RESIZING)


class MpsMode:
    mode = Mode.MPS

    def __init__(self, gateway: Gateway, units: Units, world: MpsWorld, paths: Paths) -> None:
        self._gateway = gateway
        self._units = units
        self._world = world
        self._paths = paths
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the effector's protocol

    async def verify(self, device: Device) -> str | None:
        if not device.mps_capable:
            return "it does not support MPS"
        rules = self._world.rules_for(device.uuid)
        if not self._guard.exists() and not rules.exclusive_process:
            return f"{self._guard} is missing, so a tenant could run past a dead control daemon"
        if not self.features().memory_limits:
            return f"{self._paths.mps_control} is missing, or too old to limit memory (before 11.5)"
        held = any(a.state in _HELD for a in self._world.allocations_on(device.uuid))
        if held or await asyncio.to_thread(self._units.running, unit_name(device.uuid)) is not None:
            return None
        return await foreign_processes(self._gateway, device)

    async def apply(self, device: Device) -> None:
        await self._close_compute_mode(device)
        await self._supervisor(device.uuid).up()

    async def resume(self, device: Device) -> None:
        """A daemon that does not answer is still watched: the checks decide what becomes of it."""
        supervisor = self._supervisor(device.uuid)
        try:
            await supervisor.up()
        except VgpuError as error:
            self._world.notice(device.uuid, str(error))
            supervisor.watch()

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        refusal = self.closed_to(allocation.request.owner.uid, device, allocation.id)
        if refusal is not None:
            raise VgpuError(
                ErrorCode.DENIED_BY_POLICY,
                f"device {device.index}: {refusal}",
                "name another device, or set mps.users to 'multi' or 'queue' in the policy",
            )
        rules = self._world.rules_for(part.device_uuid)
        self._say_who_waits(allocation, device)
        await self._supervisor(part.device_uuid).limit()
        tenant = tenant_folder(self._paths.run_dir, allocation.id)
        owner = allocation.request.owner
        write_tenant(tenant, part, rules.processes_per_tenant, owner.uid, owner.gid)
        nodes = device_nodes(device, None, self._paths.host_root)
        folder = DeviceFolder.of(self._paths.run_dir, part.device_uuid)
        return part, mps_edits(allocation, part, folder, tenant, self._guard, rules, nodes)

    async def resize(self, allocation: Allocation) -> None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} is held by MPS, whose limits are fixed when a process starts",
            "allocate anew with the other size and release this one",
        )

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        remove_tenant(tenant_folder(self._paths.run_dir, allocation.id))
        if not self._world.slices_on(part.device_uuid):
            return
        try:
            await self._supervisor(part.device_uuid).limit()
        except VgpuError as error:  # a release waits for no daemon: the checks see to one that hangs
            log.warning("limits stay those of a larger tenant", device=part.device_uuid, why=str(error))

    async def unapply(self, device_uuid: str) -> None:
        await self._supervisor(device_uuid).down()
        await self._restore_compute_mode(device_uuid)
        self._supervisors.pop(device_uuid, None)

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        return use_of(part, await self._processes(allocation, part))

    async def tenants(self, allocation: Allocation, part: Slice) -> tuple[int, ...]:
        return pids_of(await self._processes(allocation, part))

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        """Several tenants share the device's list; each process names its own in its environment."""
        listed = await slice_processes(self._gateway, part)
        return tuple(p for p in listed if allocation_of(p.pid) == allocation.id)

    # --- who may come

    def closed_to(self, uid: int, device: Device, but: str = "") -> str | None:
        """Why this uid is not to have a share of the device now; `but` is an allocation left out."""
        others = [a for a in self._world.allocations_on(device.uuid) if a.id != but]
        rules = self._world.rules_for(device.uuid)
        most = self.features().client_limit(device.compute_capability)
        if (len(others) + 1) * rules.processes_per_tenant > most:
            return (
                f"its MPS server takes {most} processes, and {len(others)} tenants may have "
                f"{rules.processes_per_tenant} each"
            )
        uids = self._other_users(uid, device.uuid, but)
        if not uids or rules.users is Users.QUEUE:
            return None
        names = ", ".join(map(str, uids))
        return f"its MPS server serves uid {names}, and uid {uid} would wait until all their programs end"

    def _say_who_waits(self, allocation: Allocation, device: Device) -> None:
        uid = allocation.request.owner.uid
        others = self._other_users(uid, device.uuid, allocation.id)
        if others:
            names = ", ".join(map(str, others))
            self._world.notice(
                device.uuid, f"programs of uid {uid} wait while any of uid {names} run: one user at a time"
            )

    def _other_users(self, uid: int, device_uuid: str, but: str) -> tuple[int, ...]:
        """Those whose programs keep this one's waiting; nobody under a server for all."""
        if self._is_multi_user(device_uuid):
            return ()
        owners = {a.request.owner.uid for a in self._world.allocations_on(device_uuid) if a.id != but}
        return tuple(sorted(owners - {uid}))

    def _is_multi_user(self, device_uuid: str) -> bool:
        supervisor = self._supervisors.get(device_uuid)
        return supervisor is not None and supervisor.multi_user

    # --- for operators

    def features(self) -> Features:
        return probe(self._paths.mps_control)

    async def report(self, device: Device) -> MpsDaemon | None:
        """None for a device without a control daemon."""
        running = await asyncio.to_thread(self._units.running, unit_name(device.uuid))
        if running is None:
            return None
        supervisor = self._supervisor(device.uuid)
        processes = await asyncio.to_thread(self._gateway.processes, device.uuid)
        return await asyncio.to_thread(
            report,
            device,
            running.pid,
            supervisor.control(),
            self.features(),
            processes,
            supervisor.multi_user,
        )

    async def terminate(self, device: Device, pid: int) -> None:
        """Ends one client without harm to the others. Raises VgpuError: NO_SUCH_CLIENT, MPS_REFUSED."""
        control = self._supervisor(device.uuid).control()
        listed = await asyncio.to_thread(control.clients)
        client = next((c for c in listed if c.pid == pid), None)
        if client is None:
            raise VgpuError(
                ErrorCode.NO_SUCH_CLIENT,
                f"no MPS client with pid {pid} among the {len(listed)} on device {device.index}",
                "see 'vgpuctl mps ls'",
            )
        await asyncio.to_thread(control.terminate_client, client.server_pid, pid)

    # --- parts

    @property
    def _guard(self) -> Path:
        return self._paths.libvgpu.with_name("libvgpu-guard.so")

    def _supervisor(self, device_uuid: str) -> Supervisor:
        found = self._supervisors.get(device_uuid)
        if found is None:
            world = self._world
            charge = Charge(
                device_uuid=device_uuid,
                program=self._paths.mps_control,
                folder=DeviceFolder.of(self._paths.run_dir, device_uuid),
                features=self.features,
                rules=lambda: world.rules_for(device_uuid),
                limits=lambda: Limits.largest(world.slices_on(device_uuid)),
                died=lambda sentence: self._died(device_uuid, sentence),
                notice=lambda sentence: world.notice(device_uuid, sentence),
            )
            found = self._supervisors[device_uuid] = Supervisor(charge, self._units)
        return found

    def _died(self, device_uuid: str, sentence: str) -> None:
        self._world.died(device_uuid, sentence)
        task = asyncio.ensure_future(self._log_lost(device_uuid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _log_lost(self, device_uuid: str) -> None:
        """The clients that the daemon took along, as long as NVML still lists them."""
        try:
            processes = await asyncio.to_thread(self._gateway.processes, device_uuid)
        except VgpuError as error:
            log.warning("who was lost cannot be said", device=device_uuid, why=str(error))
            return
        lost = {p.pid: allocation_of(p.pid) for p in processes if p.kind != "graphics"}
        log.error("MPS clients lost", device=device_uuid, allocation_by_pid=lost)

    async def _close_compute_mode(self, device: Device) -> None:
        """EXCLUSIVE_PROCESS: a program that comes past MPS gets no context at all, guard or not."""
        wanted = self._world.rules_for(device.uuid).exclusive_process
        if not wanted or device.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
            return
        await self._world.originals.remember(device.uuid, ORIGINAL_KEY, device.compute_mode.value)
        await asyncio.to_thread(self._gateway.set_compute_mode, device.uuid, ComputeMode.EXCLUSIVE_PROCESS)

    async def _restore_compute_mode(self, device_uuid: str) -> None:
        original = self._world.originals.recall(device_uuid, ORIGINAL_KEY)
        if original is None:
            return
        await asyncio.to_thread(self._gateway.set_compute_mode, device_uuid, ComputeMode(original))
        await self._world.originals.drop(device_uuid, ORIGINAL_KEY)

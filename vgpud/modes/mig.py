"""Mode `mig`: each slice is a GPU instance with one compute instance, or one of several compute instances in
a GPU instance.

A slice is identified by its profile and placement, never by instance ids, which change at a reboot. The
original MIG mode, and each instance that vgpud makes (mig_records.py), is recorded before the change. vgpud
does not destroy foreign instances unless the policy requests it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.holders import command
from vgpud.hardware.nodes import device_nodes
from vgpud.hardware.reset import reset_device
from vgpud.model.device import ComputeInstance, Device, GpuInstance
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import counted
from vgpud.model.rows import Rows
from vgpud.model.tenancy import Allocation, Edits, MigSlice, Mode, Slice
from vgpud.modes.base import Paths, remember
from vgpud.modes.edits import cuda_env
from vgpud.modes.gpu_use import GpuUse
from vgpud.modes.mig_records import Key, MigRecords, Part

log = structlog.get_logger(__name__)

ORIGINAL_KEY = "mig_mode"
_ON, _OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class Wish:
    """The MIG state that policy and administrator request for a device. Instances of `layout` stay, allocated
    or not.
    """

    layout: frozenset[Key] | None = None
    foreign: str = "keep"
    reset: bool = False
    # the compute instances into which GPU instances of the layout are divided
    computes: frozenset[Part] = frozenset()


class MigMode(GpuUse):
    """The effector of mode `mig`. `wish(device_uuid)` is called before each use. Without a layout, an
    instance lives as long as its slice.
    """

    mode = Mode.MIG
    suspendable = None

    def __init__(
        self,
        gateway: Gateway,
        originals: Rows,
        records: MigRecords,
        paths: Paths,
        wish: Callable[[str], Wish] = lambda _: Wish(),
    ) -> None:
        super().__init__(gateway)
        self._originals = originals
        self._paths = paths
        self._wish = wish
        self._locks: dict[str, asyncio.Lock] = {}
        self.records = records

    def _lock(self, device_uuid: str) -> asyncio.Lock:
        return self._locks.setdefault(device_uuid, asyncio.Lock())

    # --- MIG mode on and off

    async def verify(self, device: Device) -> str | None:
        if not device.mig.capable:
            return "it cannot be partitioned by MIG"
        if device.mig.current:
            return None
        processes = await asyncio.to_thread(self._gateway.processes, device.uuid)
        if not processes:
            return None
        named = ", ".join(f"{p.pid} ({command(p.pid)})" for p in processes[:5])
        return f"it is used by {counted(len(processes), 'process')}, and MIG mode needs it idle (pid {named})"

    async def apply(self, device: Device) -> None:
        """Enables MIG mode. Raises VgpuError: DEVICE_IN_USE (with the processes), or RESET_NEEDED if the card
        needs a reset that the policy forbids or a process prevents.
        """
        if device.mig.current:
            return
        await remember(self._originals, device.uuid, ORIGINAL_KEY, _OFF)
        try:
            in_force = await self._switch(device.uuid, enabled=True)
        except VgpuError:
            await self._originals.drop(device.uuid, ORIGINAL_KEY)
            raise
        if not in_force:
            await self._originals.drop(device.uuid, ORIGINAL_KEY)
            raise VgpuError(
                ErrorCode.RESET_NEEDED,
                f"MIG mode of device {device.index} takes effect only with a GPU reset, which needs "
                "mig.reset in the policy and a device without processes",
                f"set mig.reset = true; or, when it is idle: nvidia-smi -i {device.index} -mig 1, then "
                f"nvidia-smi --gpu-reset -i {device.index}",
            )

    async def _switch(self, device_uuid: str, enabled: bool) -> bool:
        """Switches MIG mode on or off. Returns True if the new mode is in force. If it needs a reset that the
        policy forbids or a process prevents, the request is cancelled, because a device with a pending reset
        serves no tenant.
        """
        if await asyncio.to_thread(self._gateway.set_mig_mode, device_uuid, enabled):
            return True
        if self._wish(device_uuid).reset:
            processes = await asyncio.to_thread(self._gateway.processes, device_uuid)
            if not processes:
                await asyncio.to_thread(reset_device, device_uuid)
                why = "MIG mode changes with it, and the policy allows it (mig.reset)"
                log.warning(LogEvent.GPU_RESET, device=device_uuid, why=why)
                return await asyncio.to_thread(self._gateway.set_mig_mode, device_uuid, enabled)
        await asyncio.to_thread(self._gateway.set_mig_mode, device_uuid, not enabled)
        return False

    async def resume(self, device: Device, part: Slice) -> None:
        return None

    async def unapply(self, device_uuid: str) -> None:
        if self._wish(device_uuid).layout is not None:
            return
        await self.restore(device_uuid)

    async def restore(self, device_uuid: str) -> None:
        """Destroys vgpud's instances, and restores the original MIG mode. The mode stays on if foreign
        instances exist, or if it needs a reset that the policy forbids or a process prevents.
        """
        for part in sorted(self.records.own_parts(device_uuid)):
            await self.unmake_part(device_uuid, part)
        for key in sorted(self.records.own(device_uuid)):
            await self.unmake(device_uuid, key)
        if self._originals.get(device_uuid, ORIGINAL_KEY) is None:
            return
        if await asyncio.to_thread(self._gateway.gpu_instances, device_uuid):
            return  # MIG mode stays on while foreign instances exist
        if await self._switch(device_uuid, enabled=False):
            await self._originals.drop(device_uuid, ORIGINAL_KEY)
        # if the card needs a reset to leave MIG mode, MIG mode stays on and the original value stays recorded

    async def switch_off(self, device_uuid: str) -> None:
        """Disables MIG mode on request. Raises VgpuError: DEVICE_IN_USE, RESET_NEEDED."""
        if not await self._switch(device_uuid, enabled=False):
            raise VgpuError(
                ErrorCode.RESET_NEEDED,
                f"MIG mode of device {device_uuid} is disabled only by a GPU reset, which needs mig.reset in "
                "the policy and a device without processes",
                "set mig.reset = true, or do it by hand with nvidia-smi -mig 0 and --gpu-reset",
            )
        await self._originals.drop(device_uuid, ORIGINAL_KEY)

    def changed(self, device_uuid: str) -> bool:
        """True if the device differs from its original state."""
        own = self.records.own(device_uuid) or self.records.own_parts(device_uuid)
        return bool(own) or self._originals.get(device_uuid, ORIGINAL_KEY) is not None

    # --- instances

    async def make(self, device_uuid: str, key: Key) -> GpuInstance:
        """Returns the GPU instance at this placement: vgpud's or a foreign one that the policy lends. A
        missing instance is created.

        Raises VgpuError: DEVICE_IN_USE for a foreign instance, NO_CAPACITY, and the errors of
        Gateway.create_gpu_instance.
        """
        async with self._lock(device_uuid):
            there = await self._find(device_uuid, key)
            if there is not None:
                if key not in self.records.own(device_uuid) and self._wish(device_uuid).foreign != "lend":
                    raise _foreign(device_uuid, key)
                if there.compute_instances and not there.is_divided:
                    return there
                if self._has_others(device_uuid, there):
                    raise _foreign(device_uuid, key)
                # The instance lacks its compute instance, is divided without an allocation, or lost parts by
                # hand, so it is made anew. (A crash between the two creations has this effect.)
                await self._destroy(device_uuid, key, there)
            await self.records.made(device_uuid, key)
            try:
                return await asyncio.to_thread(self._gateway.create_gpu_instance, device_uuid, *key)
            except VgpuError as error:
                # after a timeout the driver may still create the instance, so its record stays
                if error.code is not ErrorCode.NVML_TIMEOUT:
                    await self.records.gone(device_uuid, key)
                raise

    async def unmake(self, device_uuid: str, key: Key) -> bool:
        """Destroys a GPU instance. Leaves it and returns False if neither vgpud made it nor the policy
        removes foreign instances, or if a foreign compute instance in it is to stay.

        Raises VgpuError: DEVICE_IN_USE with the processes on the instance.
        """
        async with self._lock(device_uuid):
            if key not in self.records.own(device_uuid) and self._wish(device_uuid).foreign != "remove":
                return False
            there = await self._find(device_uuid, key)
            if there is not None and self._has_others(device_uuid, there):
                return False
            await self._destroy(device_uuid, key, there)
            return True

    async def _destroy(self, device_uuid: str, key: Key, there: GpuInstance | None) -> None:
        """Destroys a GPU instance with its compute instances, then removes their records; the record of the
        GPU instance last.
        """
        if there is not None:
            await asyncio.to_thread(self._gateway.destroy_gpu_instance, device_uuid, there.id)
        for part in sorted(self.records.own_parts(device_uuid)):
            if part[0] == key:
                await self.records.part_gone(device_uuid, part)
        await self.records.gone(device_uuid, key)

    def _has_others(self, device_uuid: str, instance: GpuInstance) -> bool:
        """Is the GPU instance divided, with a compute instance that vgpud did not make and that the policy
        keeps?
        """
        if not instance.is_divided or self._wish(device_uuid).foreign == "remove":
            return False
        own = self.records.own_parts(device_uuid)
        return any((instance.key, one.key) not in own for one in instance.compute_instances)

    # --- compute instances that take a part of their GPU instance

    async def make_part(self, device_uuid: str, part: Part) -> tuple[GpuInstance, ComputeInstance]:
        """Returns the compute instance at this placement: vgpud's or a lent one. If it is missing it is
        created, with its GPU instance.

        If vgpud has an undivided GPU instance without an allocation at the placement, that instance is
        destroyed first. Raises VgpuError: DEVICE_IN_USE for a foreign instance, NO_CAPACITY, and the errors
        of Gateway.create_*.
        """
        key, place = part
        async with self._lock(device_uuid):
            there = await self._find(device_uuid, key)
            if there is not None:
                one = there.compute(place)
                ours = part in self.records.own_parts(device_uuid)
                if one is not None and there.is_divided:
                    if not ours and self._wish(device_uuid).foreign != "lend":
                        raise _foreign(device_uuid, key)
                    return there, one
                if key not in self.records.own(device_uuid):
                    raise _foreign(device_uuid, key)
                if there.compute_instances and not there.is_divided:
                    await asyncio.to_thread(self._gateway.destroy_gpu_instance, device_uuid, there.id)
                    there = None
            if there is None:
                there = await self._create(device_uuid, key)
            return await self._create_part(device_uuid, there, part)

    async def _create(self, device_uuid: str, key: Key) -> GpuInstance:
        """Creates and records a GPU instance that is to be divided."""
        await self.records.made(device_uuid, key)
        try:
            return await asyncio.to_thread(self._gateway.create_gpu_instance, device_uuid, *key, False)
        except VgpuError as error:
            if error.code is not ErrorCode.NVML_TIMEOUT:
                await self.records.gone(device_uuid, key)
            raise

    async def _create_part(
        self, device_uuid: str, instance: GpuInstance, part: Part
    ) -> tuple[GpuInstance, ComputeInstance]:
        await self.records.part_made(device_uuid, part)
        try:
            made = await asyncio.to_thread(
                self._gateway.create_compute_instance, device_uuid, instance.id, part[1]
            )
        except VgpuError as error:
            if error.code is not ErrorCode.NVML_TIMEOUT:
                await self.records.part_gone(device_uuid, part)
                await self._drop_if_empty(device_uuid, part[0])
            raise
        one = made.compute(part[1])
        if one is None:
            raise VgpuError(
                ErrorCode.NVML_FAILED,
                "the driver does not list the compute instance that was made at compute slice "
                f"{part[1][1].start} of GPU instance {made.id} of {device_uuid}",
                "look for the driver's lines (NVRM, Xid) in the kernel log",
            )
        return made, one

    async def unmake_part(self, device_uuid: str, part: Part) -> bool:
        """Destroys a compute instance, under the same conditions as `unmake`. If it is the last in its GPU
        instance, that instance is destroyed too, provided vgpud made it and no layout contains it.
        """
        async with self._lock(device_uuid):
            if (
                part not in self.records.own_parts(device_uuid)
                and self._wish(device_uuid).foreign != "remove"
            ):
                return False
            there = await self._find(device_uuid, part[0])
            one = None if there is None else there.compute(part[1])
            if there is not None and one is not None:
                await asyncio.to_thread(self._gateway.destroy_compute_instance, device_uuid, there.id, one.id)
            await self.records.part_gone(device_uuid, part)
            await self._drop_if_empty(device_uuid, part[0])
            return True

    async def _drop_if_empty(self, device_uuid: str, key: Key) -> None:
        """Destroys a GPU instance of vgpud that has no compute instances, unless the layout contains it."""
        if key not in self.records.own(device_uuid) or key in (self._wish(device_uuid).layout or ()):
            return
        there = await self._find(device_uuid, key)
        if there is None or not there.compute_instances:
            await self._destroy(device_uuid, key, there)

    async def is_part_there(self, device_uuid: str, part: Part) -> bool:
        there = await self._find(device_uuid, part[0])
        return there is not None and there.compute(part[1]) is not None

    async def is_there(self, device_uuid: str, key: Key) -> bool:
        return await self._find(device_uuid, key) is not None

    async def _find(self, device_uuid: str, key: Key) -> GpuInstance | None:
        instances = await asyncio.to_thread(self._gateway.gpu_instances, device_uuid)
        return next((i for i in instances if (i.profile_id, i.placement) == key), None)

    # --- slices

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        place = _place(part)
        if place.compute_key is not None:
            instance, compute = await self.make_part(part.device_uuid, (place.key, place.compute_key))
        else:
            instance = await self.make(part.device_uuid, place.key)
            compute = instance.compute_instances[0]
        done = replace(
            part,
            mig=replace(
                place,
                gpu_instance_id=instance.id,
                compute_instance_id=compute.id,
                uuid=compute.uuid,
            ),
        )
        nodes = device_nodes(device, done.mig, self._paths.host_root)
        completed = replace(allocation, slices=tuple(done if s is part else s for s in allocation.slices))
        return done, Edits(env=cuda_env(completed), device_nodes=nodes)

    async def is_stale(self, allocation: Allocation, part: Slice, device: Device) -> bool:
        """Do the ids or device nodes recorded for the slice differ from the present ones?

        The driver assigns the numbers of capability nodes, and they may have changed.
        """
        place = _place(part)
        instance = await self._find(part.device_uuid, place.key)
        if instance is None or not instance.compute_instances:
            return False  # a missing instance is created by a repair, so it does not count as stale
        compute = instance.compute_instances[0]
        if place.compute_key is not None:
            at = instance.compute(place.compute_key)
            if at is None:
                return False
            compute = at
        now = (instance.id, compute.id, compute.uuid)
        if now != (place.gpu_instance_id, place.compute_instance_id, place.uuid):
            return True
        given = allocation.edits.device_nodes
        return any(n not in given for n in device_nodes(device, place, self._paths.host_root))

    async def resize(self, allocation: Allocation) -> None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} holds MIG instances, whose size is fixed",
            "allocate one of another profile and release this one",
        )

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        """Releases the slice's instance. Instances of the layout and foreign instances that were lent
        stay.
        """
        place = _place(part)
        key, wish = place.key, self._wish(part.device_uuid)
        if place.compute_key is not None:
            await self._detach_part(part.device_uuid, (key, place.compute_key), wish)
            return
        layout = wish.layout
        if key in self.records.own(part.device_uuid) and (layout is None or key not in layout):
            await self.unmake(part.device_uuid, key)

    async def _detach_part(self, device_uuid: str, part: Part, wish: Wish) -> None:
        if part in wish.computes:
            return
        if part in self.records.own_parts(device_uuid):
            await self.unmake_part(device_uuid, part)
            return
        # an earlier detach was interrupted after it had destroyed the compute instance
        async with self._lock(device_uuid):
            await self._drop_if_empty(device_uuid, part[0])


def _place(part: Slice) -> MigSlice:
    if part.mig is None:
        raise VgpuError(
            ErrorCode.BUG, "a slice in mode mig has no placement", "report this with the journal of vgpud"
        )
    return part.mig


def _foreign(device_uuid: str, key: Key) -> VgpuError:
    return VgpuError(
        ErrorCode.DEVICE_IN_USE,
        f"the instance of profile {key[0]} at memory slice {key[1].start} of device {device_uuid} was made "
        "by another program",
        'see "vgpuctl mig ls"; with mig.foreign = "lend" in the policy, idle ones are given to tenants',
    )

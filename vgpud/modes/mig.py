"""Mode `mig`: one GPU instance, with its compute instance, for each slice.

A slice is found again by its profile and placement, never by instance ids, which NVML gives anew
after a reboot. What was there before vgpud (the MIG mode) is in the ledger before it changes.
"""

import asyncio
from dataclasses import replace

from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import Device, DeviceProcess, GpuInstance
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, Edits, MigSlice, Mode, Slice
from vgpud.model.view import SliceUse
from vgpud.modes.base import Originals, Paths
from vgpud.modes.edits import cuda_env
from vgpud.modes.gpu_use import foreign_processes, pids_of, slice_processes, use_of

ORIGINAL_KEY = "mig_mode"


class MigMode:
    mode = Mode.MIG

    def __init__(self, gateway: Gateway, originals: Originals, paths: Paths) -> None:
        self._gateway = gateway
        self._originals = originals
        self._paths = paths

    async def verify(self, device: Device) -> str | None:
        if not device.mig.capable:
            return "it cannot be partitioned by MIG"
        if device.mig.current:
            return None
        return await foreign_processes(self._gateway, device)

    async def apply(self, device: Device) -> None:
        if device.mig.current:
            return
        await self._originals.remember(device.uuid, ORIGINAL_KEY, "off")
        in_force = await asyncio.to_thread(self._gateway.set_mig_mode, device.uuid, True)
        if not in_force:
            raise VgpuError(
                ErrorCode.RESET_NEEDED,
                f"MIG mode of device {device.index} is requested but needs a GPU reset to come into force",
                "drain the device and reset it, or reboot",
            )

    async def resume(self, device: Device) -> None:
        return None

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        place = _place(part)
        instance = await self._find(part.device_uuid, place)
        if instance is None or not instance.compute_instances:
            instance = await asyncio.to_thread(
                self._gateway.create_gpu_instance, part.device_uuid, place.profile_id, place.placement
            )
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

    async def _find(self, device_uuid: str, place: MigSlice) -> GpuInstance | None:
        instances = await self._instances(device_uuid)
        return next(
            (i for i in instances if (i.profile_id, i.placement) == (place.profile_id, place.placement)),
            None,
        )

    async def _instances(self, device_uuid: str) -> tuple[GpuInstance, ...]:
        return await asyncio.to_thread(self._gateway.gpu_instances, device_uuid)

    async def resize(self, allocation: Allocation) -> None:
        raise VgpuError(
            ErrorCode.UNSUPPORTED,
            f"allocation {allocation.id} holds MIG instances, whose size is fixed",
            "allocate one of another profile and release this one",
        )

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        try:
            instance = await self._find(part.device_uuid, _place(part))
            if instance is not None:
                await asyncio.to_thread(self._gateway.destroy_gpu_instance, part.device_uuid, instance.id)
        except VgpuError as error:
            if error.code is not ErrorCode.GPU_LOST:  # the reset that it needs takes its instances too
                raise

    async def unapply(self, device_uuid: str) -> None:
        if self._originals.recall(device_uuid, ORIGINAL_KEY) is None:
            return
        try:
            if await self._instances(device_uuid):
                return  # someone else's instances: MIG mode stays while they do
            await asyncio.to_thread(self._gateway.set_mig_mode, device_uuid, False)
        except VgpuError as error:
            if error.code is not ErrorCode.GPU_LOST:
                raise
            return  # the original stays on record for when the device is back
        await self._originals.drop(device_uuid, ORIGINAL_KEY)

    async def use(self, allocation: Allocation, part: Slice, device: Device) -> SliceUse:
        return use_of(part, await self._processes(allocation, part))

    async def tenants(self, allocation: Allocation, part: Slice) -> tuple[int, ...]:
        return pids_of(await self._processes(allocation, part))

    async def _processes(self, allocation: Allocation, part: Slice) -> tuple[DeviceProcess, ...]:
        return await slice_processes(self._gateway, part)


def _place(part: Slice) -> MigSlice:
    if part.mig is None:
        raise VgpuError(ErrorCode.BUG, "a mig slice without a placement", "please report this")
    return part.mig

"""The last snapshot of the hardware. The snapshot is refreshed when something may have changed, when a reader
needs a newer one, and at intervals while a device is sick.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from vgpud import clock
from vgpud.hardware.gateway import Gateway
from vgpud.model.device import Device, DeviceProcess, Health, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.view import Vitals


class Inventory:
    """The devices of the node in the last good snapshot. Before the first good one there are no devices, and
    `error` is the reason, for example a missing driver.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # the inventory calls this when NVML lists devices and the snapshot before had none
        self.came_back: Callable[[], None] = lambda: None
        # the inventory calls this with the devices whose health has changed
        self.health_changed: Callable[[tuple[Device, ...]], None] = lambda _: None
        # Callback to the policy for a device for which NVML asks for a repair: is the device excluded?
        self.closes: Callable[[Device], bool] = lambda _: True
        self._node = Node()
        self._error: VgpuError | None = None
        self._taken = float("-inf")  # time of the snapshot, in seconds of the monotonic clock
        self._running: asyncio.Task[None] | None = None

    @property
    def node(self) -> Node:
        return self._node

    @property
    def error(self) -> VgpuError | None:
        """Why the last snapshot failed; None if it did not. If it failed, `node` has the devices of the last
        good snapshot.
        """
        return self._error

    @property
    def nvml_errors(self) -> Mapping[int, int]:
        """Number of failed NVML calls, by NVML's status."""
        return self._gateway.nvml.refusals

    def device(self, uuid: str) -> Device:
        """The device with this UUID. Raises VgpuError(NO_SUCH_DEVICE)."""
        found = self._node.device(uuid)
        if found is None:
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"no device {uuid} among the {len(self._node.devices)} of this node",
                "see 'vgpuctl devices'",
            )
        return found

    async def vitals(self) -> dict[str, Vitals]:
        """Sensor readings by UUID; devices that do not answer are left out."""
        return await asyncio.to_thread(self._vitals)

    def _vitals(self) -> dict[str, Vitals]:
        found = {}
        for device in self._node.devices:
            if device.health.answers:
                with suppress(VgpuError):  # a device may be lost since the snapshot, or answer too slowly now
                    found[device.uuid] = self._gateway.vitals(device.uuid)
        return found

    def processes(self, device_uuid: str) -> tuple[DeviceProcess, ...]:
        """The processes that NVML lists on the device. Blocks. Raises VgpuError as Gateway.processes does."""
        return self._gateway.processes(device_uuid)

    async def refresh(self, max_age_seconds: float = 0.0) -> None:
        """Takes a snapshot unless the last one is recent enough. Concurrent callers share a snapshot. If the
        last snapshot failed, a new one is taken. A failure is not raised: `error` has it.
        """
        if max_age_seconds > 0 and self._error is None and clock.now() - self._taken <= max_age_seconds:
            return
        if self._running is not None:
            await asyncio.shield(self._running)
            if max_age_seconds > 0:
                return
            # A snapshot that was already running may have begun before the caller's change, so another one is
            # taken. All callers that waited share it.
        if self._running is None:
            self._running = asyncio.ensure_future(self._take())
        await asyncio.shield(self._running)

    async def _take(self) -> None:
        try:
            before = self._node
            self._node = self._judged(await asyncio.to_thread(self._gateway.snapshot))
            self._error = None
            if self._node.devices and not before.devices:
                self.came_back()
            changed = tuple(
                d for d in self._node.devices if _condition(d) != _condition(before.device(d.uuid))
            )
            if changed:
                self.health_changed(changed)
        except VgpuError as error:
            self._error = error
        finally:
            # `_running` is cleared here and not in a callback of the task: a caller that comes between the
            # task's end and the callback would take the ended snapshot for a new one.
            self._running = None
        self._taken = clock.now()

    def _judged(self, node: Node) -> Node:
        sick = {d.uuid for d in node.devices if d.ailment and d.health is Health.OK and self.closes(d)}
        if not sick:
            return node
        devices = (replace(d, health=Health.SICK) if d.uuid in sick else d for d in node.devices)
        return replace(node, devices=tuple(devices))


def _condition(device: Device | None) -> tuple[Health, str]:
    """The health of a device, and the repair that a sick one needs; OK if the device was not known before."""
    if device is None:
        return Health.OK, ""
    return device.health, device.ailment if device.health is Health.SICK else ""

"""Watches a device's Xid errors and recovery actions, which the driver reports as events."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from vgpud.hardware.compute import Handle
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nvml import GPU_IS_LOST, TIMEOUT, Nvml, NvmlRefusal
from vgpud.hardware.repair import asked_for
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)

# longest time of one wait for events: a wait cannot be interrupted, so this also bounds the time to stop
WAIT_MILLISECONDS = 5000
RETRY_SECONDS = 10.0
XID_CRITICAL_ERROR = 0x8  # value of nvmlEventTypeXidCriticalError in nvml.h
RECOVERY_ACTION = 0x8000  # value of nvmlEventTypeGpuRecoveryAction in nvml.h
_NO_INSTANCE = 0xFFFFFFFF

# Xids that report a fault of a program and leave the device healthy. Sources: NVIDIA's document "Xid Errors",
# and the list that NVIDIA's Kubernetes device plugin leaves out of its health checks.
_APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An event of a device. `xid` and `action` are None if NVML reports a lost device. `uuid` is empty if
    NVML does not name the device; the next snapshot of all devices then finds the lost one.
    """

    uuid: str
    xid: int | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    action: int | None = None  # the recovery action that NVML asks for, in an event without an Xid

    @property
    def is_application_fault(self) -> bool:
        return self.xid in _APPLICATION_XIDS

    @property
    def sentence(self) -> str:
        who = self.uuid or "a device"
        if self.action is not None:
            return f"{who}: {asked_for(self.action) or 'NVML asks for no repair any more'}"
        if self.xid is None:
            return f"{who} has fallen off the bus"
        where = "" if self.gpu_instance_id is None else f" in gpu instance {self.gpu_instance_id}"
        blame = ", the fault of a program on it" if self.is_application_fault else ""
        return f"{who} reported Xid {self.xid}{where}{blame}"


def watch_events(
    gateway: Gateway,
    callback: Callable[[DeviceEvent], None],
    stop: threading.Event,
    registered: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Starts and returns a thread that calls `callback` (in that thread) for each event, until `stop` is set.
    It calls `registered` each time the devices are registered: the driver keeps no events of the time before,
    so the caller then reads the health of the devices.

    The thread ends within WAIT_MILLISECONDS of `stop`. It survives a missing driver, a lost device and a
    driver reload. Devices without events are left out. The thread is a daemon thread, so it does not keep the
    process alive.
    """
    words = (gateway, callback, stop, registered)
    thread = threading.Thread(target=_watch, args=words, name="nvml-events", daemon=True)
    thread.start()
    return thread


def _watch(
    gateway: Gateway,
    callback: Callable[[DeviceEvent], None],
    stop: threading.Event,
    registered: Callable[[], None],
) -> None:
    told = ""
    while not stop.is_set():
        try:
            event_set, watched, listed = gateway.run("its events", lambda: _register(gateway.nvml))
            try:
                if not watched:
                    log.info(LogEvent.NO_DEVICE_WITH_XID_EVENTS, devices=listed)
                    return
                registered()
                _wait(gateway.nvml, event_set, listed, callback, stop)
            finally:
                gateway.nvml.call("nvmlEventSetFree", event_set)
        except VgpuError as error:
            if isinstance(error, NvmlRefusal) and error.status == GPU_IS_LOST:
                callback(DeviceEvent("", None))
            if error.sentence != told:
                told = error.sentence
                log.warning(LogEvent.XID_EVENTS_INTERRUPTED, error=told, retry_seconds=RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)


def _register(nvml: Nvml) -> tuple[Handle, int, int]:
    """Registers all devices for events. Returns the event set, the number of devices that it watches, and the
    number of all devices.
    """
    event_set: Handle = nvml.demand("nvmlEventSetCreate")
    listed = int(nvml.demand("nvmlDeviceGetCount"))
    watched = 0
    for index in range(listed):
        try:
            handle = nvml.demand("nvmlDeviceGetHandleByIndex", index)
            supported = nvml.call("nvmlDeviceGetSupportedEventTypes", handle) or 0
            if supported & XID_CRITICAL_ERROR:
                types = supported & (XID_CRITICAL_ERROR | RECOVERY_ACTION)
                nvml.demand("nvmlDeviceRegisterEvents", handle, types, event_set)
                watched += 1
        except NvmlRefusal as refusal:
            log.info(LogEvent.DEVICE_WITHOUT_XID_EVENTS, index=index, why=refusal.sentence)
    return event_set, watched, listed


def _wait(
    nvml: Nvml,
    event_set: Handle,
    listed: int,
    callback: Callable[[DeviceEvent], None],
    stop: threading.Event,
) -> None:
    """Waits for events until `stop`, or until the number of devices differs from `listed`."""
    while not stop.is_set():
        try:
            data = nvml.demand("nvmlEventSetWait", event_set, WAIT_MILLISECONDS)
        except NvmlRefusal as refusal:
            if refusal.status != TIMEOUT:
                raise
            if nvml.demand("nvmlDeviceGetCount") != listed:
                return
            continue
        if data.eventType & RECOVERY_ACTION:
            callback(DeviceEvent(_uuid(nvml, data.device), None, action=int(data.eventData)))
        elif data.eventType & XID_CRITICAL_ERROR:
            callback(
                DeviceEvent(
                    uuid=_uuid(nvml, data.device),
                    xid=int(data.eventData),
                    gpu_instance_id=_instance(data.gpuInstanceId),
                    compute_instance_id=_instance(data.computeInstanceId),
                )
            )


def _uuid(nvml: Nvml, device: Handle) -> str:
    """The device's UUID; empty if the device is lost, because nvmlDeviceGetUUID then fails too."""
    try:
        return nvml.call("nvmlDeviceGetUUID", device) or ""
    except NvmlRefusal:
        return ""


def _instance(value: int) -> int | None:
    return None if value == _NO_INSTANCE else int(value)

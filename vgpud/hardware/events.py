"""Watches the Xid errors, recovery actions and fatal errors of devices, which the driver reports as events.

Drivers from branch 615 on report errors of a GPU's modules as operational events (nvidia-ml-py 13.615,
nvmlEventSetRegisterGpuOperationalEvents_v1, nvmlEventSetWait_v3). Operational events were not tried on a
card.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
_ALL_LOG_LEVELS = 0  # NVML_GPU_OPERATIONAL_EVENT_LOG_LEVEL_ALL
_FATAL = 40  # NVML_OPERATIONAL_EVENT_SEVERITY_FATAL
_OPERATIONAL = 1  # NVML_EVENT_DATA_TYPE_GPU_OPERATIONAL_EVENT
_RECOVERED = 0x1  # NVML_OPERATIONAL_EVENT_GROUP_ATTR_RECOVERED

# Xids that report a fault of a program and leave the device healthy. Sources: NVIDIA's document "Xid Errors",
# and the list that NVIDIA's Kubernetes device plugin leaves out of its health checks.
_APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An event of a device. `xid`, `action` and `fatal` are None or empty if NVML reports a lost device.
    `uuid` is empty if NVML does not name the device; the next snapshot of all devices then finds the lost
    one.
    """

    uuid: str
    xid: int | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    action: int | None = None  # the recovery action that NVML asks for, in an event without an Xid
    fatal: str = ""  # the fatal error, in an event without an Xid

    @property
    def is_application_fault(self) -> bool:
        return self.xid in _APPLICATION_XIDS

    @property
    def sentence(self) -> str:
        who = self.uuid or "a device"
        if self.fatal:
            return f"{who}: {self.fatal}"
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
    The thread calls `registered` each time the devices are registered. The driver keeps no events from before
    the registration, so `registered` should read the health of the devices.

    The thread ends within WAIT_MILLISECONDS of `stop`, unless NVML hangs. It survives a missing driver, a
    lost device and a driver reload. Devices without events are left out; if there are no others, the thread
    ends. The thread is a daemon thread, so it does not keep the process alive.
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
            events, watched, listed = gateway.run("its events", lambda: _register(gateway.nvml))
            try:
                if not watched:
                    log.info(LogEvent.NO_DEVICE_WITH_XID_EVENTS, devices=listed)
                    return
                registered()
                _wait(gateway.nvml, events, listed, callback, stop)
            finally:
                gateway.nvml.call("nvmlEventSetFree", events.handle)
        except VgpuError as error:
            if isinstance(error, NvmlRefusal) and error.status == GPU_IS_LOST:
                callback(DeviceEvent("", None))
            if error.sentence != told:
                told = error.sentence
                log.warning(LogEvent.XID_EVENTS_INTERRUPTED, error=told, retry_seconds=RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)


@dataclass
class _EventSet:
    handle: Handle
    operational: bool = False  # True if the driver reports operational events, which only wait_v3 returns


def _register(nvml: Nvml) -> tuple[_EventSet, int, int]:
    """Registers the devices that report Xid errors for events. Returns the event set, the number of devices
    that it watches, and the number of all devices.
    """
    events = _EventSet(nvml.demand("nvmlEventSetCreate"))
    listed = int(nvml.demand("nvmlDeviceGetCount"))
    watched = 0
    for index in range(listed):
        try:
            handle = nvml.demand("nvmlDeviceGetHandleByIndex", index)
            supported = nvml.call("nvmlDeviceGetSupportedEventTypes", handle) or 0
            if supported & XID_CRITICAL_ERROR:
                types = supported & (XID_CRITICAL_ERROR | RECOVERY_ACTION)
                nvml.demand("nvmlDeviceRegisterEvents", handle, types, events.handle)
                watched += 1
                events.operational |= _register_fatal(nvml, events.handle, _uuid(nvml, handle))
        except NvmlRefusal as refusal:
            log.info(LogEvent.DEVICE_WITHOUT_XID_EVENTS, index=index, why=refusal.sentence)
    return events, watched, listed


def _register_fatal(nvml: Nvml, event_set: Handle, uuid: str) -> bool:
    try:
        asked = nvml.structure("c_nvmlGpuOperationalEventConfig_v1_t", uuid.encode(), _ALL_LOG_LEVELS, _FATAL)
        nvml.demand("nvmlEventSetRegisterGpuOperationalEvents_v1", event_set, asked)
    except NvmlRefusal:  # older drivers and bindings have no operational events
        return False
    return True


def _wait(
    nvml: Nvml,
    events: _EventSet,
    listed: int,
    callback: Callable[[DeviceEvent], None],
    stop: threading.Event,
) -> None:
    """Waits for events until `stop`, or until the number of devices differs from `listed`."""
    while not stop.is_set():
        try:
            data = _next(nvml, events)
        except NvmlRefusal as refusal:
            if refusal.status != TIMEOUT:
                raise
            if nvml.demand("nvmlDeviceGetCount") != listed:
                return
            continue
        uuid = str(data.uuid) if events.operational else _uuid(nvml, data.device)
        if events.operational and data.dataType == _OPERATIONAL:
            if data.severity >= _FATAL and not data.groupAttributes & _RECOVERED:
                where = f"{data.sourceModule} (code {data.moduleEventCode})"
                why = f"NVML reports a fatal error of {where}"
                nvml.fatal.put(uuid, why)
                callback(DeviceEvent(uuid, None, fatal=why))
        elif data.eventType & RECOVERY_ACTION:
            if not data.eventData:
                nvml.fatal.drop(uuid)
            callback(DeviceEvent(uuid, None, action=int(data.eventData)))
        elif data.eventType & XID_CRITICAL_ERROR:
            callback(
                DeviceEvent(
                    uuid=uuid,
                    xid=int(data.eventData),
                    gpu_instance_id=_instance(data.gpuInstanceId),
                    compute_instance_id=_instance(data.computeInstanceId),
                )
            )


def _next(nvml: Nvml, events: _EventSet) -> Any:  # noqa: ANN401  # a structure of the binding
    """Waits for an event. Raises NvmlRefusal, with the status TIMEOUT if there is none."""
    if not events.operational:
        return nvml.demand("nvmlEventSetWait", events.handle, WAIT_MILLISECONDS)
    waited = nvml.structure("c_nvmlEventSetWait_v3_t", WAIT_MILLISECONDS)
    nvml.demand("nvmlEventSetWait_v3", events.handle, waited)
    return waited


def _uuid(nvml: Nvml, device: Handle) -> str:
    """The device's UUID; empty if the device is lost, because nvmlDeviceGetUUID then fails too."""
    try:
        return nvml.call("nvmlDeviceGetUUID", device) or ""
    except NvmlRefusal:
        return ""


def _instance(value: int) -> int | None:
    return None if value == _NO_INSTANCE else int(value)

"""The watch for Xid events: the events that it reports, and how it goes on after failures of NVML."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tests.hardware.fakenvml import FakeGpu, FakeNvml, uuid_of
from vgpud.hardware import events
from vgpud.hardware.events import DeviceEvent, watch_events
from vgpud.hardware.fatal import FatalEvents
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.repair import RECOVERY_ACTION

NONE = 0xFFFFFFFF


def xid(
    nvml: FakeNvml, gpu: int, number: int, gi: int = NONE, ci: int = NONE, kind: int = 8
) -> SimpleNamespace:
    return SimpleNamespace(
        device=nvml.gpus[gpu], eventType=kind, eventData=number, gpuInstanceId=gi, computeInstanceId=ci
    )


class Told:
    """Collects events; sets `stop` after `wanted` events."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.events: list[DeviceEvent] = []
        self.stop = threading.Event()

    def __call__(self, event: DeviceEvent) -> None:
        self.events.append(event)
        if len(self.events) >= self.wanted:
            self.stop.set()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.01)


def watch(nvml: FakeNvml, wanted: int) -> list[DeviceEvent]:
    told = Told(wanted)
    thread = watch_events(Gateway(binding=nvml), told, told.stop)
    thread.join(300)
    assert not thread.is_alive()
    return told.events


def test_an_xid_event_names_its_device_and_mig_instance() -> None:
    nvml = FakeNvml(2)
    nvml.events = [xid(nvml, 1, 79), xid(nvml, 0, 5, kind=4), xid(nvml, 0, 13, gi=3, ci=0)]
    assert watch(nvml, 2) == [DeviceEvent(uuid_of(1), 79), DeviceEvent(uuid_of(0), 13, 3, 0)]


def test_xids_of_program_faults_are_not_device_errors() -> None:
    lost, program = DeviceEvent("GPU-1", 79), DeviceEvent("GPU-1", 31, 2)
    assert (lost.is_application_fault, program.is_application_fault) == (False, True)
    assert lost.sentence == "GPU-1 reported Xid 79"
    assert program.sentence == "GPU-1 reported Xid 31 in gpu instance 2, the fault of a program on it"
    assert DeviceEvent("", None).sentence == "a device has fallen off the bus"


def test_a_lost_device_is_reported_and_the_watch_for_xid_events_continues() -> None:
    nvml = FakeNvml(2)
    nvml.events = [pynvml.NVML_ERROR_GPU_IS_LOST, xid(nvml, 1, 48)]
    assert watch(nvml, 2) == [DeviceEvent("", None), DeviceEvent(uuid_of(1), 48)]


@pytest.mark.parametrize("status", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT])
def test_nvml_errors_and_timeouts_do_not_end_the_watch_for_xid_events(status: int) -> None:
    nvml = FakeNvml(1)
    nvml.events = [status, status, xid(nvml, 0, 48)]
    assert [e.xid for e in watch(nvml, 1)] == [48]


def test_the_watch_for_xid_events_continues_after_a_driver_reload() -> None:
    nvml = FakeNvml(1)
    nvml.events = [xid(nvml, 0, 48), pynvml.NVML_ERROR_UNINITIALIZED, xid(nvml, 0, 74)]
    assert [e.xid for e in watch(nvml, 2)] == [48, 74]


def test_the_watch_waits_for_a_driver_that_is_missing() -> None:
    nvml = FakeNvml(1)
    nvml.answers["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    nvml.events = [xid(nvml, 0, 48)]
    told = Told(1)
    thread = watch_events(Gateway(binding=nvml), told, told.stop)
    while nvml.calls.count("nvmlInit") < 3:
        threading.Event().wait(0.005)
    del nvml.answers["nvmlInit"]
    thread.join(300)
    assert [e.xid for e in told.events] == [48]


def test_devices_that_appear_later_are_watched_too() -> None:
    nvml = FakeNvml(2)
    late = nvml.gpus.pop()
    told = Told(1)
    thread = watch_events(Gateway(binding=nvml), told, told.stop)
    while "nvmlEventSetWait" not in nvml.calls:
        threading.Event().wait(0.005)
    nvml.gpus.append(late)
    while nvml.calls.count("nvmlDeviceRegisterEvents") < 3:
        threading.Event().wait(0.005)
    nvml.events.append(xid(nvml, 1, 48))
    thread.join(300)
    assert told.events == [DeviceEvent(uuid_of(1), 48)]


class OperationalNvml(FakeNvml):
    """NVML of a driver that reports operational events. nvmlEventSetWait_v3 returns events of both kinds."""

    c_nvmlGpuOperationalEventConfig_v1_t = pynvml.c_nvmlGpuOperationalEventConfig_v1_t  # noqa: N815
    c_nvmlEventSetWait_v3_t = pynvml.c_nvmlEventSetWait_v3_t  # noqa: N815
    registered: list[tuple[str, int]]

    def nvmlEventSetRegisterGpuOperationalEvents_v1(self, event_set: str, config: Any) -> None:  # noqa: N802
        self.registered.append((config.uuid, config.minSeverity))

    def nvmlEventSetWait_v3(self, event_set: str, waited: Any) -> None:  # noqa: N802
        event = self.nvmlEventSetWait(event_set, waited.timeoutMs)
        for name, value in vars(event).items():
            setattr(waited, name, value)


def operational(gpu: int, **fields: object) -> SimpleNamespace:
    given = {"uuid": uuid_of(gpu).encode(), "dataType": 1, "severity": 40, "sourceModule": b"MMU"}
    return SimpleNamespace(**given, moduleEventCode=7, **fields)


def named(gpu: int, kind: int, data: int) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid_of(gpu).encode(), eventType=kind, eventData=data, gpuInstanceId=NONE)


def test_a_fatal_error_of_a_module_makes_the_device_sick_until_its_repair() -> None:
    nvml = OperationalNvml(2)
    nvml.registered = []
    nvml.events = [operational(0, groupAttributes=1), operational(1), named(0, 8, 48)]
    gateway = Gateway(binding=nvml)
    sick: list[tuple[str, str]] = []

    def snapshots(event: DeviceEvent) -> None:
        sick.extend((device.uuid, device.ailment) for device in gateway.snapshot().devices if device.ailment)
        if event.xid == 48:
            nvml.events.append(named(1, 0x8000, 0))
        if event.action is not None:
            stop.set()

    stop = threading.Event()
    watch_events(gateway, snapshots, stop).join(300)
    why = "NVML reports a fatal error of MMU (code 7)"
    assert sick == [(uuid_of(1), why), (uuid_of(1), why)]  # after the fatal event and the Xid
    assert nvml.registered == [(uuid_of(0), 40), (uuid_of(1), 40)]
    assert DeviceEvent("GPU-1", None, fatal=why).sentence == f"GPU-1: {why}"


class RepairNvml(OperationalNvml):
    """NVML of a driver that reports a recovery action for each device. For None, the query fails."""

    def __init__(self, *actions: int | None) -> None:
        super().__init__(len(actions))
        self.actions = actions

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, numbers: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        action = self.actions[self.gpus.index(gpu)]
        value = SimpleNamespace(uiVal=action or 0)
        return [
            SimpleNamespace(nvmlReturn=action is None or n != RECOVERY_ACTION, value=value) for n in numbers
        ]


def told(path: Path, module: Path, *seen: SimpleNamespace) -> None:
    """Runs the watch for events until it has seen the events `seen`. `path` is the file of fatal errors, and
    `module` the folder of the driver's module in sysfs.
    """
    nvml = OperationalNvml(2)
    nvml.registered = []
    nvml.events = list(seen)
    collect = Told(len(seen))
    watch_events(Gateway(binding=nvml, fatal=FatalEvents(path, module)), collect, collect.stop).join(300)


def sick_after_a_start(path: Path, module: Path, *actions: int | None) -> list[str]:
    """The uuids of the devices that a starting vgpud finds sick, by the file of fatal errors at `path`."""
    nvml = RepairNvml(*actions) if actions else OperationalNvml(2)
    gateway = Gateway(binding=nvml, fatal=FatalEvents(path, module))
    return [device.uuid for device in gateway.snapshot().devices if device.ailment]


def test_a_repair_of_the_device_while_vgpud_is_stopped_ends_its_fatal_error(tmp_path: Path) -> None:
    path = tmp_path / "fatal.json"
    told(path, tmp_path, operational(0, groupAttributes=0), operational(1, groupAttributes=0))
    assert sick_after_a_start(path, tmp_path, 0, 0) == [uuid_of(0), uuid_of(1)]
    assert sick_after_a_start(path, tmp_path, 1, 0) == [uuid_of(0), uuid_of(1)]
    assert sick_after_a_start(path, tmp_path, None, None) == [uuid_of(0), uuid_of(1)]
    assert sick_after_a_start(path, tmp_path, 0, 0) == [uuid_of(1)]


def test_a_fatal_error_outlives_vgpud_until_its_repair_or_the_drivers_next_start(tmp_path: Path) -> None:
    path, module = tmp_path / "fatal.json", tmp_path / "nvidia"
    module.mkdir()
    told(path, module, operational(0, groupAttributes=0), operational(1, groupAttributes=0))
    assert sick_after_a_start(path, module) == [uuid_of(0), uuid_of(1)]
    told(path, module, named(0, 0x8000, 0))
    assert sick_after_a_start(path, module) == [uuid_of(1)]
    (tmp_path / "loaded-again").mkdir()
    module.rmdir()
    (tmp_path / "loaded-again").rename(module)
    assert sick_after_a_start(path, module) == []
    path.write_text('{"module": 1, "sentences": ')
    assert sick_after_a_start(path, module) == []


def test_each_registration_is_reported_before_its_events() -> None:
    """A device that breaks before its registration raises no event. So the caller reads the device's health
    when the registration is reported.
    """
    nvml = FakeNvml(2)
    nvml.events = [xid(nvml, 0, 48), pynvml.NVML_ERROR_UNINITIALIZED, xid(nvml, 1, 74)]
    seen: list[str] = []
    stop = threading.Event()

    def told(event: DeviceEvent) -> None:
        seen.append(f"xid {event.xid}")
        if event.xid == 74:
            stop.set()

    watch_events(Gateway(binding=nvml), told, stop, lambda: seen.append("registered")).join(300)
    assert seen == ["registered", "xid 48", "registered", "xid 74"]


def test_the_watch_ends_at_once_if_no_device_supports_xid_events() -> None:
    nvml = FakeNvml(2)
    nvml.answers["nvmlDeviceGetSupportedEventTypes"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert watch(nvml, 1) == []
    assert "nvmlEventSetWait" not in nvml.calls
    assert "nvmlEventSetFree" in nvml.calls


def test_events_of_other_devices_are_watched_after_one_is_lost() -> None:
    nvml = FakeNvml(2)
    nvml.answers["nvmlDeviceGetHandleByIndex", 0] = pynvml.NVML_ERROR_GPU_IS_LOST
    nvml.events = [xid(nvml, 1, 48)]
    assert [e.uuid for e in watch(nvml, 1)] == [uuid_of(1)]

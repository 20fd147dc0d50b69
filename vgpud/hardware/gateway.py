"""The gateway: snapshots of the node's devices and the changes made on them, through NVML only."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pynvml
import structlog

from vgpud.hardware import change
from vgpud.hardware.compute import Handle
from vgpud.hardware.fatal import FatalEvents
from vgpud.hardware.mig import read_instances, read_profiles
from vgpud.hardware.nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    INVALID_ARGUMENT,
    LIB_RM_VERSION_MISMATCH,
    NOT_FOUND,
    UNINITIALIZED,
    Nvml,
    NvmlRefusal,
)
from vgpud.hardware.read import Reader, Static, read_links, read_memory, read_processes, read_vitals
from vgpud.hardware.workers import Workers
from vgpud.model.device import (
    ComputeMode,
    Device,
    DeviceProcess,
    GpuInstance,
    Health,
    Link,
    Node,
    PlaceKey,
    Placement,
)
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.view import Vitals

log = structlog.get_logger(__name__)
T = TypeVar("T")

# deadline of NVML's initialisation: without the persistence daemon the first client initialises every GPU,
# which takes seconds for each
INIT_SECONDS = 60.0
# deadline of calls during a MIG change: destroying an instance takes about a second, and any MIG call can
# take ten under load
CHANGE_SECONDS = 60.0
_MOST_DEVICES = 256  # maximum of devices read, because a broken driver may report any number
_NODE = "the node"
_NO_LIMIT = 2**64 - 1  # value of NVML_DEVICE_MEMORY_LIMIT_MAX in nvidia-ml-py 13.615
# NVML statuses which mean that the library has to be initialised again, not that a device is lost
_LIBRARY_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})


@dataclass(frozen=True, slots=True)
class _System:
    driver_version: str
    nvml_version: str
    cuda_version: str
    device_count: int


@dataclass(frozen=True, slots=True)
class _Unwell:
    """A device that could not be read. `uuid` is empty if even its UUID could not be read."""

    index: int
    uuid: str
    error: VgpuError


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts that a snapshot keeps for the next one."""

    devices: dict[str, Device]
    statics: dict[str, Static]
    links_of: tuple[object, ...] = ()
    links: dict[tuple[str, str], Link] | None = None


class Gateway:
    """Modules outside vgpud/hardware use NVML only through this class. Thread-safe; the first call loads and
    initialises NVML.

    Every method raises VgpuError: NVML_MISSING, DRIVER_MISSING, NVML_TIMEOUT, NVML_FAILED. Methods block,
    each NVML call in them for up to its deadline, so an event loop calls them through `asyncio.to_thread`.
    """

    def __init__(
        self,
        deadline_seconds: float = 5.0,
        host_root: Path = Path("/"),
        binding: ModuleType = pynvml,
        fatal: FatalEvents | None = None,
    ) -> None:
        self.nvml = Nvml(binding, fatal)
        self.deadline_seconds = deadline_seconds
        self.host_root = host_root
        self._reader = Reader(self.nvml, host_root)
        self._workers = Workers()
        self._lock = threading.Lock()
        self._generation = 0  # number of the current initialisation of NVML; 0 while NVML is not initialised
        self._generations = 0
        self._changes = 0  # number of running device changes, which lengthen the deadline of each call
        self._known = _Known({}, {})

    def call(self, name: str, *args: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """Makes one NVML call by its name in the binding. Returns None if NVML has no answer, for example
        because the card does not support the call.
        """
        return self.run(_NODE, lambda: self.nvml.call(name, *args))

    def run(self, subject: str, job: Callable[[], T], deadline_seconds: float | None = None) -> T:
        """Runs `job` in a worker, with a deadline for each NVML call. If the driver was reloaded meanwhile,
        the job runs again.

        The job must fetch the handles that it uses, because a reload invalidates handles. During a MIG change
        any call may wait inside the driver, so the deadline is longer.
        """
        deadline = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        if self._changes:
            deadline = max(deadline, CHANGE_SECONDS)
        generation = self._ensure_init()
        try:
            return self._workers.run(subject, deadline, job)
        except NvmlRefusal as refusal:
            if refusal.status != UNINITIALIZED:
                raise
        self._forget_init(generation)
        self._ensure_init()
        log.warning(LogEvent.NVML_INITIALISED_AGAIN, subject=subject)
        return self._workers.run(subject, deadline, job)

    def close(self) -> None:
        """Shuts NVML down, so that the driver can be unloaded; the next call initialises NVML again.

        Precondition: the event watch has ended. Does nothing if NVML is not initialised.
        """
        with self._lock:
            if self._generation:
                self._workers.run(_NODE, self.deadline_seconds, lambda: self.nvml.demand("nvmlShutdown"))
                self._generation = 0

    def _ensure_init(self) -> int:
        generation = self._generation
        if generation:
            return generation
        with self._lock:
            if not self._generation:
                self._workers.run("its start", INIT_SECONDS, lambda: self.nvml.demand("nvmlInit"))
                if self._generations:
                    # NVML was initialised again, so fatal events from before no longer count
                    self.nvml.fatal.clear()
                self._generations += 1
                self._generation = self._generations
            return self._generation

    def _forget_init(self, generation: int) -> None:
        """Marks NVML as not initialised. If several callers saw the same driver reload, only one of them
        initialises NVML again.
        """
        with self._lock:
            if self._generation == generation:
                self._generation = 0
                self._known = replace(self._known, statics={}, links_of=())

    # --- snapshots

    def snapshot(self) -> Node:
        """Reads all devices. A device that is lost or does not answer is listed with that health."""
        system = self.run(_NODE, self._read_system)
        known = self._known
        if system.device_count != len(known.devices):
            known = replace(known, statics={}, links_of=())
        statics: dict[str, Static] = {}
        read: list[Device] = []
        unwell: list[_Unwell] = []
        for answer in self._read_all(system, known):
            if isinstance(answer, _Unwell):
                unwell.append(answer)
                continue
            device, statics[answer[0].uuid] = answer
            read.append(device)
        links_of, links = self._links(read, system, known)
        devices = sorted(read + _marked(unwell, read, known), key=lambda device: device.index)
        self._known = _Known({d.uuid: d for d in devices}, statics, links_of, links)
        return Node(
            devices=tuple(devices),
            driver_version=system.driver_version,
            nvml_version=system.nvml_version,
            cuda_version=system.cuda_version,
            simulated=self.nvml.simulated,
            links=links,
        )

    def _read_system(self) -> _System:
        cuda = self.nvml.call("nvmlSystemGetCudaDriverVersion")
        return _System(
            driver_version=self.nvml.call("nvmlSystemGetDriverVersion") or "",
            nvml_version=self.nvml.call("nvmlSystemGetNVMLVersion") or "",
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            device_count=min(int(self.nvml.demand("nvmlDeviceGetCount")), _MOST_DEVICES),
        )

    def _read_all(self, system: _System, known: _Known) -> list[tuple[Device, Static] | _Unwell]:
        """Reads devices in order. After the first that does not answer, the others are read concurrently: the
        other hung devices then cost one deadline together.
        """
        rest = list(range(system.device_count))
        found: list[tuple[Device, Static] | _Unwell] = []
        while rest:
            answer = self._read_index(rest.pop(0), system, known)
            found.append(answer)
            if isinstance(answer, _Unwell) and answer.error.code is ErrorCode.NVML_TIMEOUT and rest:
                with ThreadPoolExecutor(len(rest), "snapshot") as pool:
                    return found + list(pool.map(lambda index: self._read_index(index, system, known), rest))
        return found

    def _read_index(self, index: int, system: _System, known: _Known) -> tuple[Device, Static] | _Unwell:
        subject = next((d.uuid for d in known.devices.values() if d.index == index), f"gpu {index}")
        seen = ""

        def job() -> tuple[Device, Static]:
            nonlocal seen
            handle = self.nvml.demand("nvmlDeviceGetHandleByIndex", index)
            seen = self.nvml.demand("nvmlDeviceGetUUID", handle)
            blank = Device(uuid=seen, index=index)
            cached = known.statics.get(seen)
            return self._reader.device(handle, blank, cached, system.driver_version)

        try:
            return self.run(subject, job)
        except VgpuError as error:
            if isinstance(error, NvmlRefusal) and error.status in _LIBRARY_GONE:
                raise
            return _Unwell(index, seen, error)

    def _links(
        self, devices: list[Device], system: _System, known: _Known
    ) -> tuple[tuple[object, ...], dict[tuple[str, str], Link]]:
        """The links between devices; empty if NVML does not report them. The links are read again if the
        devices, the driver or a MIG mode change.
        """
        key: tuple[object, ...] = (
            system.driver_version,
            *((d.uuid, d.index, d.mig.current, d.mig.pending) for d in devices),
        )
        if known.links is not None and known.links_of == key:
            return key, known.links
        handle = "nvmlDeviceGetHandleByIndex"
        try:
            links = self.run(
                "its links",
                lambda: read_links(self.nvml, {d.uuid: self.nvml.demand(handle, d.index) for d in devices}),
            )
        except VgpuError as error:
            log.warning(LogEvent.DEVICE_LINKS_UNREADABLE, why=str(error))
            return (), {}
        return key, links

    # --- one device

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        """Lists the processes on a device. Raises VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST."""
        return self._on_device(uuid, lambda: read_processes(self.nvml, self._handle(uuid)))

    def vitals(self, uuid: str) -> Vitals:
        """Reads the changing figures of a device, such as temperature. Raises VgpuError as every method, and
        NO_SUCH_DEVICE, GPU_LOST.
        """
        return self._on_device(uuid, lambda: read_vitals(self.nvml, self._handle(uuid)))

    def gpu_instances(self, uuid: str) -> tuple[GpuInstance, ...]:
        """Lists the GPU instances that exist now. Raises VgpuError as every method, and NO_SUCH_DEVICE,
        GPU_LOST.
        """

        def job() -> tuple[GpuInstance, ...]:
            handle = self._handle(uuid)
            total_bytes = read_memory(self.nvml, handle).total_bytes
            return read_instances(self.nvml, handle, read_profiles(self.nvml, handle, total_bytes))

        return self._on_device(uuid, job)

    def set_mig_mode(self, uuid: str, enabled: bool) -> bool:
        """Turns MIG mode on or off. Returns True if the mode is in force, False if the device needs a reset
        for it.

        Raises VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST, DEVICE_IN_USE, RESET_NEEDED,
        UNSUPPORTED.
        """
        return self._change(uuid, lambda target: change.set_mig_mode(target, enabled))

    def create_gpu_instance(
        self, uuid: str, profile_id: int, placement: Placement, whole: bool = True
    ) -> GpuInstance:
        """Creates a GPU instance, with one compute instance over all of it or with none; see
        change.create_gpu_instance for errors.
        """
        return self._change(
            uuid, lambda target: change.create_gpu_instance(target, profile_id, placement, whole)
        )

    def create_compute_instance(self, uuid: str, gpu_instance_id: int, key: PlaceKey) -> GpuInstance:
        """Creates a compute instance in an existing GPU instance; see change.create_compute_instance for
        errors.
        """
        return self._change(uuid, lambda target: change.create_compute_instance(target, gpu_instance_id, key))

    def destroy_compute_instance(self, uuid: str, gpu_instance_id: int, compute_instance_id: int) -> None:
        """Destroys a compute instance and leaves its GPU instance. Idempotent.

        Raises VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST, DEVICE_IN_USE.
        """
        self._change(
            uuid,
            lambda target: change.destroy_compute_instance(target, gpu_instance_id, compute_instance_id),
        )

    def destroy_gpu_instance(self, uuid: str, gpu_instance_id: int) -> None:
        """Destroys the compute instances of a GPU instance, then the GPU instance. Idempotent, also after an
        interruption at any point.

        Raises VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST, DEVICE_IN_USE.
        """
        self._change(uuid, lambda target: change.destroy_gpu_instance(target, gpu_instance_id))

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Sets the compute mode of a device. Raises VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST,
        DEVICE_IN_USE, UNSUPPORTED.
        """
        self._change(uuid, lambda target: change.set_compute_mode(target, mode))

    # --- memory limits of control groups

    def memory_limit(self, uuid: str, group: str) -> int | None:
        """The hard memory limit of a control group on a device, in bytes; None means no limit. `group` is the
        group's folder.

        NVML call: nvmlDeviceGetMemoryLimits_v1, in drivers from branch 615 on (nvidia-ml-py 13.615). Raises
        VgpuError as every method, and NO_SUCH_DEVICE, GPU_LOST, UNSUPPORTED.
        """

        def job() -> int:
            limits = self.nvml.structure("c_nvmlGetMemoryLimits_v1_t", group.encode())
            self.nvml.demand("nvmlDeviceGetMemoryLimits_v1", self._handle(uuid), limits)
            return int(limits.hardLimit)

        found = self._on_device(uuid, job)
        return None if found == _NO_LIMIT else found

    def set_memory_limit(self, uuid: str, group: str, limit_bytes: int | None) -> None:
        """Sets the hard memory limit of a control group on a device, and no soft limit. Raises the errors of
        `memory_limit`.
        """

        def job() -> None:
            hard = _NO_LIMIT if limit_bytes is None else limit_bytes
            limits = self.nvml.structure("c_nvmlSetMemoryLimits_v1_t", group.encode(), 0, hard)
            self.nvml.demand("nvmlDeviceSetMemoryLimits_v1", self._handle(uuid), limits)

        self._on_device(uuid, job)

    def _change(self, uuid: str, work: Callable[[change.Target], T]) -> T:
        def job() -> T:
            return work(change.Target(self.nvml, self._handle(uuid), uuid))

        with self._lock:
            self._changes += 1
        try:
            return self._on_device(uuid, job, CHANGE_SECONDS)
        finally:
            with self._lock:
                self._changes -= 1

    def _on_device(self, uuid: str, job: Callable[[], T], deadline_seconds: float | None = None) -> T:
        try:
            return self.run(uuid, job, deadline_seconds)
        except NvmlRefusal as refusal:
            raise refusal.about(uuid) from refusal

    def _handle(self, uuid: str) -> Handle:
        """NVML's handle of a device. It is valid inside one worker job only."""
        try:
            return self.nvml.demand("nvmlDeviceGetHandleByUUID", uuid)
        except NvmlRefusal as refusal:
            if refusal.status in (NOT_FOUND, GPU_NOT_FOUND, INVALID_ARGUMENT):
                raise VgpuError(
                    ErrorCode.NO_SUCH_DEVICE,
                    f"no device {uuid} on this node",
                    "see `vgpuctl devices` for what is there",
                ) from refusal
            raise


def _marked(unwell: list[_Unwell], read: list[Device], known: _Known) -> list[Device]:
    """The device records for devices that could not be read, with the last known facts.

    A device whose UUID was never read gets a made-up one, so that it is listed nevertheless.
    """
    present = {device.uuid for device in read}
    marked: list[Device] = []
    for one in unwell:
        last = known.devices.get(one.uuid) or next(
            (d for d in known.devices.values() if d.index == one.index and d.uuid not in present), None
        )
        device = last or Device(uuid=one.uuid or f"unknown-gpu-{one.index}", index=one.index)
        lost = isinstance(one.error, NvmlRefusal) and one.error.status == GPU_IS_LOST
        silent = one.error.code is ErrorCode.NVML_TIMEOUT
        health = Health.LOST if lost else Health.SILENT if silent else Health.FAILED
        if device.health is not health:
            log.error(
                LogEvent.DEVICE_UNHEALTHY, device=device.uuid, health=health.value, why=one.error.sentence
            )
        marked.append(
            replace(device, index=one.index, processes=(), health=health, health_reason=one.error.sentence)
        )
    return marked

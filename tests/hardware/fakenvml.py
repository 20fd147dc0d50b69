# ruff: noqa: N802, N815  # names are those of nvml.h
"""A fake of NVML in one module: the real binding's structs and errors, with devices made of Python objects.

A function that the module lacks is one that the driver or the binding lacks. `answers` makes a function
return a status, for all devices or for one. `hangs` makes it wait for an event.
"""

import ctypes
import threading
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

MIB = 1024**2
NOT_FOUND, NOT_SUPPORTED, INSUFFICIENT_RESOURCES, INVALID_ARGUMENT = 6, 3, 23, 2
NO_INSTANCE = 0xFFFFFFFF

# index, id, name, slices, instances, SMs, MiB, placements; from data/h200-580.159.04.txt
H200_PROFILES = (
    (0, 19, "MIG 1g.18gb", 1, 7, 16, 16384, [(s, 1) for s in range(7)]),
    (1, 14, "MIG 2g.35gb", 2, 3, 32, 33280, [(s, 2) for s in (0, 2, 4)]),
    (2, 9, "MIG 3g.71gb", 3, 2, 60, 71424, [(0, 4), (4, 4)]),
    (3, 5, "MIG 4g.71gb", 4, 1, 64, 71424, [(0, 4)]),
    (4, 0, "MIG 7g.141gb", 7, 1, 132, 143360, [(0, 8)]),
    (7, 20, "MIG 1g.18gb+me", 1, 1, 16, 16384, [(s, 1) for s in range(7)]),
    (9, 15, "MIG 1g.35gb", 1, 4, 26, 33280, [(s, 2) for s in (0, 2, 4, 6)]),
)
H200_BYTES = 150754820096
H200_RESERVED = 644939776


@dataclass
class FakeGpu:
    index: int
    uuid: str
    name: str = "NVIDIA H200"
    mig: list[int] = field(default_factory=lambda: [0, 0])
    compute_mode: int = 0
    processes: list[SimpleNamespace] = field(default_factory=list)
    mps_processes: list[SimpleNamespace] = field(default_factory=list)
    instances: dict[int, "FakeInstance"] = field(default_factory=dict)


@dataclass
class FakeInstance:
    gpu: FakeGpu
    id: int
    profile: tuple[Any, ...]
    placement: tuple[int, int]
    compute: list["FakeCompute"] = field(default_factory=list)


@dataclass
class FakeCompute:
    profile: int
    placement: tuple[int, int]
    id: int


def process(
    pid: int, memory: int | None = 512 * MIB, instance: int = NO_INSTANCE, compute: int = NO_INSTANCE
) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=instance, computeInstanceId=compute)


def uuid_of(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


class FakeNvml(ModuleType):
    """Used as `Gateway(binding=...)`."""

    NVMLError = pynvml.NVMLError
    c_nvmlGpuInstance_t = pynvml.c_nvmlGpuInstance_t
    c_nvmlComputeInstance_t = pynvml.c_nvmlComputeInstance_t
    c_nvmlGpuInstancePlacement_t = pynvml.c_nvmlGpuInstancePlacement_t
    c_nvmlComputeInstancePlacement_t = pynvml.c_nvmlComputeInstancePlacement_t
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    NVML_GPU_INSTANCE_PROFILE_COUNT = 0x11
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT = 0x8

    def __init__(self, count: int = 2) -> None:
        super().__init__("pynvml")
        self.gpus = [FakeGpu(i, uuid_of(i)) for i in range(count)]
        self.answers: dict[str | tuple[str, int], int] = {}
        self.hangs: dict[str | tuple[str, int], threading.Event] = {}
        self.calls: list[str] = []
        self.inits = 0
        self.activation = 0
        self.events: list[SimpleNamespace | int] = []
        self.driver = "580.159.04"

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(value):
            return value
        missing = super().__getattribute__("answers").get(name) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        if missing:
            raise AttributeError(name)

        def called(*args: Any) -> Any:
            self.calls.append(name)
            gpu = args[0] if args and isinstance(args[0], FakeGpu) else None
            index = args[0] if name == "nvmlDeviceGetHandleByIndex" else gpu.index if gpu else None
            for key in (name, (name, index)):
                if key in self.hangs:
                    self.hangs[key].wait(30)
            for key in (name, (name, index), ("*", index)):
                if key in self.answers:
                    raise pynvml.NVMLError(self.answers[key])
            if not self.inits and name not in ("nvmlInit", "nvmlShutdown"):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            return value(*args)

        return called

    # functions of the library

    def nvmlInit(self) -> None:
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.inits = 0

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetNVMLVersion(self) -> bytes:
        return b"13.580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(NOT_FOUND)

    # functions of a device

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return gpu.name.encode()

    def nvmlDeviceGetMinorNumber(self, gpu: FakeGpu) -> int:
        return gpu.index

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{gpu.index + 6:02X}:00.0", pciDeviceId=0x233510DE)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        used = sum(p.usedGpuMemory or 0 for p in gpu.processes)
        if version is None:
            return SimpleNamespace(total=H200_BYTES, used=used + H200_RESERVED)
        if "memory_v2" in self.answers:
            raise pynvml.NVMLError(self.answers["memory_v2"])
        return SimpleNamespace(total=H200_BYTES, reserved=H200_RESERVED, used=used)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetNumGpuCores(self, gpu: FakeGpu) -> int:
        return 16896

    def nvmlDeviceGetVirtualizationMode(self, gpu: FakeGpu) -> int:
        return 1

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return gpu.compute_mode

    def nvmlDeviceSetComputeMode(self, gpu: FakeGpu, mode: int) -> None:
        gpu.compute_mode = mode

    def nvmlDeviceGetMemoryAffinity(self, gpu: FakeGpu, words: int, scope: int) -> list[int]:
        return [1 << (gpu.index // 4)] + [0] * (words - 1)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return list(gpu.processes)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return list(gpu.mps_processes)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, index: int) -> int:
        return 0 if one.index // 4 == other.index // 4 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: FakeGpu, other: FakeGpu) -> int:
        return 50

    # functions of MIG

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return list(gpu.mig)

    def nvmlDeviceSetMigMode(self, gpu: FakeGpu, mode: int) -> int:
        gpu.mig[1] = mode
        if self.activation == 0:
            gpu.mig[0] = mode
        return self.activation

    def nvmlDeviceGetGpuInstanceProfileInfo(self, gpu: FakeGpu, index: int, version: int) -> SimpleNamespace:
        if version == 2 and "profile_v2" in self.answers:
            raise pynvml.NVMLError(self.answers["profile_v2"])
        row = next((p for p in H200_PROFILES if p[0] == index), None)
        if row is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        info = SimpleNamespace(
            id=row[1],
            sliceCount=row[3],
            instanceCount=row[4],
            multiprocessorCount=row[5],
            memorySizeMB=row[6],
        )
        if version == 2:
            info.name = row[2]
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, gpu: FakeGpu, profile: int, room: Any, count: Any
    ) -> int:
        places = _row(profile)[7]
        count.contents.value = len(places)
        for at, (start, size) in enumerate(places if room is not None else ()):
            room[at].start, room[at].size = start, size
        return 0

    def nvmlDeviceGetGpuInstances(self, gpu: FakeGpu, profile: int, room: Any, count: Any) -> int:
        listed = [i for i in gpu.instances.values() if i.profile[1] == profile]
        count.contents.value = len(listed)
        for at, instance in enumerate(listed):
            room[at] = _pointer(pynvml.struct_c_nvmlGpuInstance_t, gpu.index * 100 + instance.id)
        return 0

    def nvmlDeviceGetGpuInstanceById(self, gpu: FakeGpu, number: int) -> Any:
        if number not in gpu.instances:
            raise pynvml.NVMLError(NOT_FOUND)
        return _pointer(pynvml.struct_c_nvmlGpuInstance_t, gpu.index * 100 + number)

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, gpu: FakeGpu, profile: int, placement: Any) -> Any:
        if not gpu.mig[0]:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        place = (placement.contents.start, placement.contents.size)
        if place not in _row(profile)[7]:
            raise pynvml.NVMLError(INVALID_ARGUMENT)
        for other in gpu.instances.values():
            if place[0] < sum(other.placement) and other.placement[0] < sum(place):
                raise pynvml.NVMLError(INSUFFICIENT_RESOURCES)
        number = next(n for n in range(1, 15) if n not in gpu.instances)
        gpu.instances[number] = FakeInstance(gpu, number, _row(profile), place)
        return _pointer(pynvml.struct_c_nvmlGpuInstance_t, gpu.index * 100 + number)

    def nvmlGpuInstanceDestroy(self, handle: Any) -> int:
        instance = self._instance(handle)
        if instance.compute:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        del instance.gpu.instances[instance.id]
        return 0

    def nvmlGpuInstanceGetInfo(self, handle: Any) -> SimpleNamespace:
        instance = self._instance(handle)
        start, size = instance.placement
        return SimpleNamespace(
            id=instance.id,
            profileId=instance.profile[1],
            placement=SimpleNamespace(start=start, size=size),
        )

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, handle: Any, index: int, engine: int, version: int
    ) -> SimpleNamespace:
        slices = _SLICES.get(index, 99)
        whole = self._instance(handle).profile
        if slices > whole[3]:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        info = SimpleNamespace(
            id=index,
            sliceCount=slices,
            instanceCount=whole[3] // slices,
            multiprocessorCount=whole[5] * slices // whole[3],
        )
        if version == 2:
            part = f"{slices}c." if slices < whole[3] else ""
            info.name = f"MIG {part}{whole[2].removeprefix('MIG ')}".encode()
        return info

    def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        self, handle: Any, profile: int, room: Any, count: Any
    ) -> int:
        size, of = _SLICES[profile], self._instance(handle).profile[3]
        starts = range(0, of - size + 1, size)
        count.contents.value = len(starts)
        for at, start in enumerate(starts if room is not None else ()):
            room[at].start, room[at].size = start, size
        return 0

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile: int) -> Any:
        return self._create_compute(handle, profile, (0, _SLICES[profile]))

    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(self, handle: Any, profile: int, at: Any) -> Any:
        return self._create_compute(handle, profile, (at.contents.start, at.contents.size))

    def _create_compute(self, handle: Any, profile: int, place: tuple[int, int]) -> Any:
        instance = self._instance(handle)
        for one in instance.compute:
            if place[0] < sum(one.placement) and one.placement[0] < sum(place):
                raise pynvml.NVMLError(INSUFFICIENT_RESOURCES)
        number = next(n for n in range(8) if all(one.id != n for one in instance.compute))
        instance.compute.append(FakeCompute(profile, place, number))
        return _pointer(pynvml.struct_c_nvmlComputeInstance_t, _address(handle) * 10 + 1 + number)

    def nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile: int, room: Any, count: Any) -> int:
        listed = [one.id for one in self._instance(handle).compute if one.profile == profile]
        count.contents.value = len(listed)
        for slot, at in enumerate(listed):
            room[slot] = _pointer(pynvml.struct_c_nvmlComputeInstance_t, _address(handle) * 10 + 1 + at)
        return 0

    def nvmlComputeInstanceGetInfo_v2(self, handle: Any) -> SimpleNamespace:
        owner, at = divmod(_address(handle), 10)
        one = next(one for one in self._at(owner).compute if one.id == at - 1)
        return SimpleNamespace(
            id=one.id,
            profileId=one.profile,
            device=f"MIG-{owner}-{one.id}",
            placement=SimpleNamespace(start=one.placement[0], size=one.placement[1]),
        )

    def nvmlComputeInstanceDestroy(self, handle: Any) -> int:
        owner, at = divmod(_address(handle), 10)
        instance = self._at(owner)
        if any(
            p.gpuInstanceId == instance.id and p.computeInstanceId in (at - 1, NO_INSTANCE)
            for p in instance.gpu.processes
        ):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        instance.compute = [one for one in instance.compute if one.id != at - 1]
        return 0

    # functions of events

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlEventSetFree(self, event_set: str) -> None:
        pass

    def nvmlDeviceGetSupportedEventTypes(self, gpu: FakeGpu) -> int:
        return 0x1F

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, event_set: str) -> None:
        pass

    def nvmlEventSetWait(self, event_set: str, milliseconds: int) -> SimpleNamespace:
        event = self.events.pop(0) if self.events else pynvml.NVML_ERROR_TIMEOUT
        if isinstance(event, int):
            raise pynvml.NVMLError(event)
        return event

    def _instance(self, handle: Any) -> FakeInstance:
        return self._at(_address(handle))

    def _at(self, address: int) -> FakeInstance:
        gpu, number = divmod(address, 100)
        if number not in self.gpus[gpu].instances:
            raise pynvml.NVMLError(NOT_FOUND)
        return self.gpus[gpu].instances[number]


# NVML_COMPUTE_INSTANCE_PROFILE_*_SLICE of nvml.h
_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}


def _row(profile: int) -> tuple[Any, ...]:
    row = next((p for p in H200_PROFILES if p[1] == profile), None)
    if row is None:
        raise pynvml.NVMLError(INVALID_ARGUMENT)
    return row


def _pointer(struct: Any, address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(struct))


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0

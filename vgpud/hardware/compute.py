"""Compute instances: the possible and the current divisions of a GPU instance.

NVML lists the compute instance profiles of existing GPU instances only. Before a first instance exists,
`presumed` derives them from NVIDIA's MIG User Guide ("Compute Instances"); values that NVML reports later
replace the derived ones.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vgpud.hardware.nvml import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, UNKNOWN, Nvml, NvmlRefusal
from vgpud.model.device import ComputeInstance, MigProfile, Placement

Handle = object
GONE = frozenset({INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED})
# Upper bounds on what NVML reports: the planner must not count with the figures of a broken driver. The
# largest profile has 8 slices.
MAX_SLICES = 64
MAX_INSTANCES = 32  # instances of one profile
MAX_PLACEMENTS = 256
# value of NVML_COMPUTE_INSTANCE_PROFILE_COUNT in nvml.h 12.9, for bindings without the constant
_PROFILE_COUNT = 0x8
_ENGINE_SHARED = 0  # value of NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
# compute slices by NVML's profile number: NVML_COMPUTE_INSTANCE_PROFILE_*_SLICE of nvml.h
_SLICES = {0x0: 1, 0x1: 2, 0x2: 3, 0x3: 4, 0x4: 7, 0x5: 8, 0x6: 6}


def presumed(profile: MigProfile) -> tuple[MigProfile, ...]:
    """The expected compute instance profiles of a future GPU instance of `profile`."""
    return tuple(
        MigProfile(
            id=number,
            name=_name(slices, profile),
            slice_count=slices,
            instance_count=profile.slice_count // slices,
            sm_count=profile.sm_count * slices // profile.slice_count,
            memory_bytes=profile.memory_bytes,
            placements=_presumed_placements(slices, profile.slice_count),
        )
        for number, slices in _SLICES.items()
        if slices <= profile.slice_count
    )


def _name(slices: int, profile: MigProfile) -> str:
    return profile.name if slices == profile.slice_count else f"{slices}c.{profile.name}"


def _presumed_placements(slices: int, of: int) -> tuple[Placement, ...]:
    """The expected placements of a profile. Each starts at a multiple of its size; a profile of three slices
    is placed like one of four.
    """
    step = 4 if slices == 3 else slices
    return tuple(Placement(start, slices) for start in range(0, of - slices + 1, step))


def read_compute_profiles(nvml: Nvml, gpu_instance: Handle, profile: MigProfile) -> tuple[MigProfile, ...]:
    """The compute instance profiles of an existing GPU instance of `profile`, in NVML's order."""
    found = []
    for index in range(nvml.constant("NVML_COMPUTE_INSTANCE_PROFILE_COUNT", _PROFILE_COUNT)):
        info = _profile_info(nvml, gpu_instance, index)
        slices = int(info.sliceCount) if info is not None else 0
        if not 0 < slices <= MAX_SLICES:
            continue
        name = getattr(info, "name", "")
        name = name.decode(errors="replace") if isinstance(name, bytes) else name
        found.append(
            MigProfile(
                id=int(info.id),
                name=name.removeprefix("MIG ") or _name(slices, profile),
                slice_count=slices,
                instance_count=min(int(info.instanceCount), MAX_INSTANCES),
                sm_count=int(info.multiprocessorCount),
                memory_bytes=profile.memory_bytes,
                placements=_placements(nvml, gpu_instance, int(info.id))
                or _presumed_placements(slices, profile.slice_count),
            )
        )
    return tuple(found)


def _profile_info(nvml: Nvml, gpu_instance: Handle, index: int) -> Any:  # noqa: ANN401  # the binding's
    """What NVML reports of a profile, in the newest struct that the driver supports. The oldest struct has no
    name of the profile.
    """
    function = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
    for version in (2, 1):
        info = nvml.call(function, gpu_instance, index, _ENGINE_SHARED, version)
        if info is not None:
            return info
    return None


def _placements(nvml: Nvml, gpu_instance: Handle, profile_id: int) -> tuple[Placement, ...]:
    """The possible placements of a compute instance profile; empty if the driver does not report them."""
    name = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
    return possible_placements(
        nvml, nvml.binding.c_nvmlComputeInstancePlacement_t, name, gpu_instance, profile_id
    )


def possible_placements(
    nvml: Nvml, kind: type[ctypes.Structure], name: str, handle: Handle, profile_id: int
) -> tuple[Placement, ...]:
    """Calls the NVML function `name` for the possible placements of a profile. The function fills in structs
    of type `kind`. Empty if the driver does not report them.
    """
    count = ctypes.pointer(ctypes.c_uint(0))
    if nvml.call(name, handle, profile_id, None, count) is None:
        return ()
    if not 0 < count.contents.value <= MAX_PLACEMENTS:
        return ()
    places = (kind * count.contents.value)()
    if nvml.call(name, handle, profile_id, places, count) is None:
        return ()
    listed = (Placement(int(p.start), int(p.size)) for p in places[: count.contents.value])
    return tuple(sorted({place for place in listed if is_possible(place)}))


def is_possible(place: Placement) -> bool:
    return place.size > 0 and place.start + place.size <= MAX_SLICES


def read_placement(place: Any, function: str) -> Placement:  # noqa: ANN401  # the binding's
    """Converts the placement of an existing instance. Raises NvmlRefusal for a placement that no card can
    have.
    """
    found = Placement(int(place.start), int(place.size))
    if not is_possible(found):
        raise NvmlRefusal(
            UNKNOWN,
            function,
            f"no card can have an instance of {found.size} slices from slice {found.start} on",
        )
    return found


def with_compute(profile: MigProfile, compute: tuple[MigProfile, ...]) -> MigProfile:
    return profile if profile.compute == compute else replace(profile, compute=compute)


Sizes = list[tuple[int, int, int]]


def read_compute_instances(nvml: Nvml, gpu_instance: Handle, sizes: Sizes) -> tuple[ComputeInstance, ...]:
    """The compute instances of a GPU instance, by id. An instance that is destroyed during the listing is
    left out.
    """
    return tuple(sorted(_read_all(nvml, gpu_instance, sizes), key=lambda instance: instance.id))


def _read_all(nvml: Nvml, gpu_instance: Handle, sizes: Sizes) -> Iterator[ComputeInstance]:
    for handle in compute_instance_handles(nvml, gpu_instance, sizes):
        try:
            yield read_compute_instance(nvml, handle)
        except NvmlRefusal as refusal:
            if refusal.status not in GONE:
                raise


def read_compute_instance(nvml: Nvml, compute_instance: Handle) -> ComputeInstance:
    """Reads a compute instance. `device` in NVML's answer is the handle of the MIG device, whose UUID is the
    MIG UUID.
    """
    info = nvml.demand("nvmlComputeInstanceGetInfo_v2", compute_instance)
    uuid = nvml.call("nvmlDeviceGetUUID", info.device) if info.device else None
    place = read_placement(info.placement, "nvmlComputeInstanceGetInfo_v2")
    return ComputeInstance(int(info.id), int(info.profileId), uuid or "", place)


def compute_instance_handles(nvml: Nvml, gpu_instance: Handle, sizes: Sizes | None = None) -> list[Handle]:
    """Handles of all compute instances of a GPU instance. NVML lists them by profile only."""
    handles: list[Handle] = []
    known = compute_sizes(nvml, gpu_instance) if sizes is None else sizes
    for profile_id in dict.fromkeys(number for number, _, _ in known):
        count = ctypes.pointer(ctypes.c_uint(0))
        room = (nvml.binding.c_nvmlComputeInstance_t * MAX_INSTANCES)()
        answer = nvml.call("nvmlGpuInstanceGetComputeInstances", gpu_instance, profile_id, room, count)
        if answer is not None:
            handles += room[: count.contents.value]
    return handles


def compute_sizes(nvml: Nvml, gpu_instance: Handle) -> Sizes:
    """Id, slices and multiprocessors of each compute instance profile, read with the oldest struct, which
    every driver supports.
    """
    found = []
    for index in range(nvml.constant("NVML_COMPUTE_INSTANCE_PROFILE_COUNT", _PROFILE_COUNT)):
        info = nvml.call(
            "nvmlGpuInstanceGetComputeInstanceProfileInfo", gpu_instance, index, _ENGINE_SHARED, 1
        )
        if info is not None:
            found.append((int(info.id), int(info.sliceCount), int(info.multiprocessorCount)))
    return found

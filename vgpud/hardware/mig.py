"""MIG facts of a device from NVML: profiles with their placements, and existing instances."""

import ctypes

from vgpud.hardware.compute import (
    GONE,
    MAX_INSTANCES,
    MAX_SLICES,
    Handle,
    compute_sizes,
    possible_placements,
    presumed,
    read_compute_instances,
    read_compute_profiles,
    read_placement,
    with_compute,
)
from vgpud.hardware.nvml import Nvml, NvmlRefusal
from vgpud.model.device import GpuInstance, MigProfile
from vgpud.model.quantity import GIB, MIB

# value of NVML_GPU_INSTANCE_PROFILE_COUNT in nvml.h 12.9, for bindings without the constant
_GPU_PROFILE_COUNT = 0x11

# Name suffix of each profile number (NVML_GPU_INSTANCE_PROFILE_* of nvml.h): the oldest struct of a profile
# has no name.
_SUFFIX_OF_INDEX: dict[int, str] = {
    0x07: "+me",
    0x08: "+me",
    0x0A: "+gfx",
    0x0B: "+gfx",
    0x0C: "+gfx",
    0x0D: "-me",
    0x0E: "-me",
    0x0F: "+me.all",
    0x10: "+me.all",
    0x11: "+gfx",
}


def read_profiles(nvml: Nvml, handle: Handle, total_bytes: int) -> tuple[MigProfile, ...]:
    """The GPU instance profiles of a device, in the order of their ids; empty if the device has no MIG.

    From driver 550 on, NVML lists them also while MIG mode is off.
    """
    found: dict[int, MigProfile] = {}
    for index in range(nvml.constant("NVML_GPU_INSTANCE_PROFILE_COUNT", _GPU_PROFILE_COUNT)):
        profile = _read_profile(nvml, handle, index, total_bytes)
        if profile is not None:
            found[profile.id] = profile
    return tuple(found[key] for key in sorted(found))


def _read_profile(nvml: Nvml, handle: Handle, index: int, total_bytes: int) -> MigProfile | None:
    info = nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, index, 2)
    name = info.name if info is not None else ""
    if info is None:
        info = nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, index, 1)
    if info is None or not 0 < int(info.sliceCount) <= MAX_SLICES:
        return None
    if isinstance(name, bytes):
        name = name.decode(errors="replace")
    memory_bytes = int(info.memorySizeMB) * MIB
    profile = MigProfile(
        id=int(info.id),
        name=name.removeprefix("MIG ") or profile_name(index, info.sliceCount, memory_bytes, total_bytes),
        slice_count=int(info.sliceCount),
        instance_count=min(int(info.instanceCount), MAX_INSTANCES),
        sm_count=int(info.multiprocessorCount),
        memory_bytes=memory_bytes,
        placements=possible_placements(
            nvml,
            nvml.binding.c_nvmlGpuInstancePlacement_t,
            "nvmlDeviceGetGpuInstancePossiblePlacements",
            handle,
            int(info.id),
        ),
    )
    return with_compute(profile, presumed(profile))


def profile_name(index: int, slice_count: int, memory_bytes: int, total_bytes: int) -> str:
    """A profile's name as nvidia-smi prints it, for drivers whose NVML does not name profiles.

    The figure after the dot is the card's memory in GiB, rounded up, times the profile's part of it in whole
    eighths: this rule reproduces every name in the tables of the MIG User Guide.
    """
    suffix = _SUFFIX_OF_INDEX.get(index, "")
    if total_bytes <= 0:
        return f"{slice_count}g{suffix}"
    eighths = -(-8 * memory_bytes // total_bytes)
    card_gib = -(-total_bytes // GIB)
    gib = (eighths * card_gib + 4) // 8  # whole GiB, rounded to the nearest, halves up
    return f"{slice_count}g.{gib}gb{suffix}"


def read_instances(nvml: Nvml, handle: Handle, profiles: tuple[MigProfile, ...]) -> tuple[GpuInstance, ...]:
    """The existing GPU instances of a device, by id. An instance that is destroyed during the listing is left
    out.
    """
    found: list[GpuInstance] = []
    for profile in profiles:
        count = ctypes.pointer(ctypes.c_uint(0))
        # According to nvml.h the array has the profile's instance count, but that count is wrong on A30, so
        # the array is larger.
        room = (nvml.binding.c_nvmlGpuInstance_t * MAX_INSTANCES)()
        if nvml.call("nvmlDeviceGetGpuInstances", handle, profile.id, room, count) is None:
            continue
        for gpu_instance in room[: count.contents.value]:
            try:
                found.append(read_instance(nvml, gpu_instance))
            except NvmlRefusal as refusal:
                if refusal.status not in GONE:
                    raise
    return tuple(sorted(found, key=lambda instance: instance.id))


def read_instance(nvml: Nvml, gpu_instance: Handle) -> GpuInstance:
    """One GPU instance with its compute instances. Raises NvmlRefusal if it no longer exists."""
    info = nvml.demand("nvmlGpuInstanceGetInfo", gpu_instance)
    sizes = compute_sizes(nvml, gpu_instance)
    return GpuInstance(
        id=int(info.id),
        profile_id=int(info.profileId),
        placement=read_placement(info.placement, "nvmlGpuInstanceGetInfo"),
        compute_instances=read_compute_instances(nvml, gpu_instance, sizes),
        slice_count=max((slices for _, slices, _ in sizes), default=None),
    )


def read_division(nvml: Nvml, handle: Handle, instance: GpuInstance, profile: MigProfile) -> MigProfile:
    """Returns `profile` with the compute instance profiles that NVML reports for `instance`, an existing
    instance of this profile.
    """
    gpu_instance = nvml.call("nvmlDeviceGetGpuInstanceById", handle, instance.id)
    found = () if gpu_instance is None else read_compute_profiles(nvml, gpu_instance, profile)
    return with_compute(profile, found or profile.compute)

"""Changes a device: its MIG mode, its instances, its compute mode.

Each function runs inside a worker, on the handle of one device. `Target` identifies the device, so that
errors can name it and the processes on it.
"""

import ctypes
import time
from dataclasses import dataclass

from vgpud.hardware.compute import (
    Handle,
    compute_instance_handles,
    compute_sizes,
    read_compute_instance,
)
from vgpud.hardware.holders import in_use
from vgpud.hardware.mig import read_instance
from vgpud.hardware.nvml import (
    IN_USE,
    INSUFFICIENT_RESOURCES,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    SUCCESS,
    Nvml,
    NvmlRefusal,
)
from vgpud.hardware.read import COMPUTE_MODES, read_processes
from vgpud.model.device import ComputeMode, GpuInstance, PlaceKey, Placement
from vgpud.model.errors import ErrorCode, VgpuError

# maximum wait until a GPU instance can be destroyed: the driver frees it a moment after its last compute
# instance was destroyed
SETTLE_SECONDS = 5.0
_SETTLE_STEP_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    nvml: Nvml
    handle: Handle
    uuid: str

    def held(
        self, what: str, gpu_instance_id: int | None = None, compute_instance_id: int | None = None
    ) -> VgpuError:
        """The error DEVICE_IN_USE, with the processes on the device or on one of its instances."""
        processes = read_processes(self.nvml, self.handle)
        if gpu_instance_id is not None:
            processes = tuple(p for p in processes if p.gpu_instance_id == gpu_instance_id)
        if compute_instance_id is not None:
            processes = tuple(p for p in processes if p.compute_instance_id in (None, compute_instance_id))
        return in_use(what, processes)


def set_mig_mode(target: Target, enabled: bool) -> bool:
    """Turns MIG mode on or off. Returns True if the mode is in force, False if NVML accepted the request and
    the device needs a reset.

    NVML gives two answers: the call's status (request accepted) and the activation status (mode in force).
    Only reading the mode back is reliable. On Hopper a request can wait for processes to end. Such a request
    is cancelled, and the error names the processes, because a device with a pending change serves no tenant.
    Raises VgpuError: DEVICE_IN_USE, RESET_NEEDED, UNSUPPORTED, NVML_FAILED, GPU_LOST.
    """
    what = f"mig mode of {target.uuid}"
    try:
        activation = target.nvml.demand("nvmlDeviceSetMigMode", target.handle, int(enabled))
    except NvmlRefusal as refusal:
        if refusal.status == IN_USE:
            raise target.held(what) from refusal
        raise
    current, pending = target.nvml.demand("nvmlDeviceGetMigMode", target.handle)
    if bool(current) is enabled and bool(pending) is enabled:
        return True
    if bool(pending) is enabled:
        if activation != IN_USE:
            return False
        target.nvml.call("nvmlDeviceSetMigMode", target.handle, int(not enabled))
    if activation == IN_USE:
        raise target.held(what)
    raise NvmlRefusal(activation if activation != SUCCESS else RESET_REQUIRED, "nvmlDeviceSetMigMode")


def create_gpu_instance(
    target: Target, profile_id: int, placement: Placement, whole: bool = True
) -> GpuInstance:
    """Creates a GPU instance. If `whole`, also creates one compute instance over all of it. If NVML refuses
    that, or the reading of the new instance, the GPU instance is destroyed again.

    Raises VgpuError: NO_CAPACITY (the place is taken), UNSUPPORTED, BAD_REQUEST, GPU_LOST, NVML_FAILED.
    """
    place = target.nvml.binding.c_nvmlGpuInstancePlacement_t(start=placement.start, size=placement.size)
    what = f"profile {profile_id} at {placement.start}:{placement.size} of {target.uuid}"
    try:
        gpu_instance = target.nvml.demand(
            "nvmlDeviceCreateGpuInstanceWithPlacement", target.handle, profile_id, ctypes.pointer(place)
        )
    except NvmlRefusal as refusal:
        raise _cannot_create(what, refusal) from refusal
    try:
        if whole:
            _create_whole(target.nvml, gpu_instance)
        return read_instance(target.nvml, gpu_instance)
    except NvmlRefusal:
        _empty(target, gpu_instance, what)
        _destroy_settled(target, gpu_instance, what)
        raise


def _cannot_create(what: str, refusal: NvmlRefusal, kind: str = "gpu") -> VgpuError:
    if refusal.status == INSUFFICIENT_RESOURCES:
        return VgpuError(
            ErrorCode.NO_CAPACITY,
            f"no room for {what}: another {kind} instance is there",
            f"see the instances with `nvidia-smi mig -l{kind[0]}i`",
        )
    if refusal.status == INVALID_ARGUMENT:
        return VgpuError(
            ErrorCode.BAD_REQUEST,
            f"the device does not have {what}",
            "take a profile and a placement that the device lists",
        )
    if refusal.status == NOT_SUPPORTED:
        return VgpuError(
            ErrorCode.UNSUPPORTED,
            f"cannot create {what}: mig mode is off, or the profile is not supported",
            "put the device into mode mig",
        )
    return refusal


def _create_whole(nvml: Nvml, gpu_instance: Handle) -> None:
    """Creates the compute instance that takes all slices of its GPU instance. If several profiles have that
    size, the first in NVML's order is used.
    """
    sizes = compute_sizes(nvml, gpu_instance)
    if not sizes:
        raise NvmlRefusal(NOT_SUPPORTED, "nvmlGpuInstanceGetComputeInstanceProfileInfo")
    profile_id, _, _ = max(sizes, key=lambda size: size[1:])
    nvml.demand("nvmlGpuInstanceCreateComputeInstance", gpu_instance, profile_id)


def create_compute_instance(target: Target, gpu_instance_id: int, key: PlaceKey) -> GpuInstance:
    """Creates a compute instance of `key` (profile id, compute slices) in an existing GPU instance.

    Raises VgpuError: NO_CAPACITY (the place is taken), UNSUPPORTED, BAD_REQUEST, GPU_LOST, NVML_FAILED.
    """
    profile_id, at = key
    what = f"compute profile {profile_id} at {at.start}:{at.size} of gpu instance {gpu_instance_id}"
    gpu_instance = target.nvml.demand("nvmlDeviceGetGpuInstanceById", target.handle, gpu_instance_id)
    place = target.nvml.binding.c_nvmlComputeInstancePlacement_t(start=at.start, size=at.size)
    try:
        target.nvml.demand(
            "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
            gpu_instance,
            profile_id,
            ctypes.pointer(place),
        )
    except NvmlRefusal as refusal:
        raise _cannot_create(f"{what} of {target.uuid}", refusal, "compute") from refusal
    return read_instance(target.nvml, gpu_instance)


def destroy_compute_instance(target: Target, gpu_instance_id: int, compute_instance_id: int) -> None:
    """Destroys a compute instance and leaves its GPU instance. Idempotent. Raises VgpuError: DEVICE_IN_USE
    (with the processes on it), GPU_LOST, NVML_FAILED.
    """
    nvml, what = target.nvml, f"compute instance {gpu_instance_id}/{compute_instance_id} of {target.uuid}"
    try:
        gpu_instance = nvml.demand("nvmlDeviceGetGpuInstanceById", target.handle, gpu_instance_id)
        for handle in compute_instance_handles(nvml, gpu_instance):
            if read_compute_instance(nvml, handle).id == compute_instance_id:
                nvml.demand("nvmlComputeInstanceDestroy", handle)
    except NvmlRefusal as refusal:
        if refusal.status == IN_USE:
            raise target.held(what, gpu_instance_id, compute_instance_id) from refusal
        if refusal.status not in (NOT_FOUND, NOT_SUPPORTED):
            raise


def destroy_gpu_instance(target: Target, gpu_instance_id: int) -> None:
    """Destroys a GPU instance with its compute instances. Idempotent, also after an interruption at any
    point.

    Raises VgpuError: DEVICE_IN_USE (with the processes on it), GPU_LOST, NVML_FAILED.
    """
    what = f"gpu instance {gpu_instance_id} of {target.uuid}"
    try:
        gpu_instance = target.nvml.demand("nvmlDeviceGetGpuInstanceById", target.handle, gpu_instance_id)
    except NvmlRefusal as refusal:
        # the instance is already destroyed, or MIG mode is off
        if refusal.status in (NOT_FOUND, NOT_SUPPORTED):
            return
        raise
    _empty(target, gpu_instance, what, gpu_instance_id)
    _destroy_settled(target, gpu_instance, what, gpu_instance_id)


def _empty(target: Target, gpu_instance: Handle, what: str, gpu_instance_id: int | None = None) -> None:
    for compute_instance in compute_instance_handles(target.nvml, gpu_instance):
        try:
            target.nvml.demand("nvmlComputeInstanceDestroy", compute_instance)
        except NvmlRefusal as refusal:
            if refusal.status == IN_USE:
                raise target.held(what, gpu_instance_id) from refusal
            if refusal.status != NOT_FOUND:
                raise


def _destroy_settled(
    target: Target, gpu_instance: Handle, what: str, gpu_instance_id: int | None = None
) -> None:
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            target.nvml.demand("nvmlGpuInstanceDestroy", gpu_instance)
        except NvmlRefusal as refusal:
            if refusal.status == NOT_FOUND:
                return
            if refusal.status != IN_USE:
                raise
            if time.monotonic() >= until:
                raise target.held(what, gpu_instance_id) from refusal
            time.sleep(_SETTLE_STEP_SECONDS)
        else:
            return


def set_compute_mode(target: Target, mode: ComputeMode) -> None:
    """Sets the compute mode of a device. Raises VgpuError: UNSUPPORTED, DEVICE_IN_USE, GPU_LOST,
    NVML_FAILED.
    """
    number = next(key for key, value in COMPUTE_MODES.items() if value is mode)
    try:
        target.nvml.demand("nvmlDeviceSetComputeMode", target.handle, number)
    except NvmlRefusal as refusal:
        if refusal.status == IN_USE:
            raise target.held(f"compute mode of {target.uuid}") from refusal
        raise

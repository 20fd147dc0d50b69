"""The edits and environments that several modes use."""

import os

from vgpud.model.tenancy import Allocation


def driver_environment() -> dict[str, str]:
    """The variables by which the driver's libraries are found. Helpers get them explicitly, because they
    start with an otherwise empty environment.
    """
    named = ("PATH", "LD_LIBRARY_PATH", "VGPU_SIM_STATE")
    return {name: os.environ[name] for name in named if name in os.environ}


def cuda_env(allocation: Allocation) -> tuple[tuple[str, str], ...]:
    """The environment in which a tenant sees only its own slices.

    Slices are attached one by one, and a MIG device has no UUID before it is attached. So each attach names
    the slices known so far, and the last one names all. NVIDIA_VISIBLE_DEVICES=void keeps NVIDIA's own
    container runtime from adding devices (container toolkit documentation).
    """
    names = [part.target for part in allocation.slices if part.target]
    return (
        ("CUDA_VISIBLE_DEVICES", ",".join(names)),
        ("NVIDIA_VISIBLE_DEVICES", "void"),
        ("VGPU_ALLOCATION", allocation.id),
    )

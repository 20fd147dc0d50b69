"""Computes the environment that puts a process of this host into an allocation."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from vgpud.api.gen import vgpud_pb2 as pb

PRELOAD = "LD_PRELOAD"
_OF_ALLOCATION = frozenset((b"VGPU_ALLOCATION", b"VGPU_LEASE", b"VGPU_MPS_TENANT", b"CUDA_VISIBLE_DEVICES"))
_OF_MPS = frozenset(
    (
        b"CUDA_MPS_PIPE_DIRECTORY",
        b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        b"CUDA_MPS_CLIENT_PRIORITY",
    )
)
_LIBRARIES = (b"libvgpu.so", b"libvgpu-guard.so")


def host_environment(allocation: pb.Allocation) -> dict[str, str]:
    """The environment variables of the allocation on a host: `env`, overridden by `host_env`."""
    return {**allocation.edits.env, **allocation.edits.host_env}


def merged(edits: Mapping[str, str], before: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns the environment `before` with `edits` in place of those of an earlier allocation. An entry for
    LD_PRELOAD is put in front of the existing ones.
    """
    after = without_allocation(before)
    for name, value in edits.items():
        key, new = os.fsencode(name), os.fsencode(value)
        old = after.get(key, b"")
        after[key] = new + b":" + old if name == PRELOAD and old else new
    return after


def without_allocation(before: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns the environment without the variables and the libraries of the allocation that it is under.
    Under two allocations of different modes, a program would get no CUDA.
    """
    if b"VGPU_ALLOCATION" not in before:
        return dict(before)
    gone = _OF_ALLOCATION | _OF_MPS if b"VGPU_MPS_TENANT" in before else _OF_ALLOCATION
    after = {name: value for name, value in before.items() if name not in gone}
    libraries = re.split(rb"[: ]+", after.pop(b"LD_PRELOAD", b""))
    others = [path for path in libraries if path and path.rpartition(b"/")[2] not in _LIBRARIES]
    if others:
        after[b"LD_PRELOAD"] = b":".join(others)
    return after


def initial_environment() -> dict[bytes, bytes]:
    """The environment that this process got from its parent, before Python changed it.

    In the C locale the interpreter sets LC_CTYPE for itself (PEP 538); the command that vgpuctl runs must not
    inherit that.
    """
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def export_lines(allocation: pb.Allocation, before: Mapping[bytes, bytes]) -> list[str]:
    """Shell code (POSIX) that changes a shell's environment `before` as `merged` does."""
    kept = without_allocation(before)
    gone = sorted(os.fsdecode(name) for name in before.keys() - kept.keys())
    lines = [f"unset {' '.join(gone)}"] if gone else []
    others = kept.get(b"LD_PRELOAD", b"")
    if others and others != before[b"LD_PRELOAD"]:
        lines.append(f"export LD_PRELOAD={shlex.quote(os.fsdecode(others))}")
    for name, value in sorted(host_environment(allocation).items()):
        quoted = shlex.quote(value)
        if name == PRELOAD:
            quoted += "${LD_PRELOAD:+:$LD_PRELOAD}"
        lines.append(f"export {name}={quoted}")
    return lines

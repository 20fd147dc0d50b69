"""Computes the environment that puts a process of this host into an allocation."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from vgpud.api.gen import vgpud_pb2 as pb

PRELOAD = "LD_PRELOAD"


def host_environment(allocation: pb.Allocation) -> dict[str, str]:
    """The environment variables of the allocation on a host: `env`, overridden by `host_env`."""
    return {**allocation.edits.env, **allocation.edits.host_env}


def merged(edits: Mapping[str, str], before: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns the environment `before` with `edits` applied. An entry for LD_PRELOAD is put in front of the
    existing ones.
    """
    after = dict(before)
    for name, value in edits.items():
        key, new = os.fsencode(name), os.fsencode(value)
        old = before.get(key, b"")
        after[key] = new + b":" + old if name == PRELOAD and old else new
    return after


def initial_environment() -> dict[bytes, bytes]:
    """The environment that this process got from its parent, before Python changed it.

    In the C locale the interpreter sets LC_CTYPE for itself (PEP 538); the command that vgpuctl runs must not
    inherit that.
    """
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def export_lines(allocation: pb.Allocation) -> list[str]:
    """Shell code (POSIX) that changes a shell's environment as `merged` does."""
    lines = []
    for name, value in sorted(host_environment(allocation).items()):
        quoted = shlex.quote(value)
        if name == PRELOAD:
            quoted += "${LD_PRELOAD:+:$LD_PRELOAD}"
        lines.append(f"export {name}={quoted}")
    return lines

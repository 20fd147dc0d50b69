"""Helpers of the tests of the native parts: paths of built programs, and processes that run with them."""

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import simnode
from vgpud import lease_layout as layout

ROOT, BUILD = simnode.ROOT, simnode.BUILD
TEST_BUILD = BUILD.with_name("native-tests")  # the folder of the test programs, which ./dev build makes
LIBVGPU = BUILD / "lib" / "libvgpu.so"
PROBE = BUILD / "bin" / "vgpu-probe"
ARBITER = BUILD / "bin" / "vgpu-arbiter"
DRIVER = TEST_BUILD / "driver"  # fake libcuda and NVML
UUIDS = tuple(f"GPU-00000000-0000-0000-0000-{i:012x}" for i in (1, 2))
# the test's own user, because an unprivileged test user cannot give leases to others
UID, GID = os.geteuid(), os.getegid()
MIB = 1 << 20
GIB = 1 << 30
CONTEXT_BYTES = 64 * MIB  # bytes of a context of the fake driver


def static_program(name: str) -> Path:
    """A statically linked test program, into which the loader can preload no library."""
    program = TEST_BUILD / name
    assert program.exists(), "no libc.a, which comes with the C library's headers: install it, ./dev build"
    return program


def connect_to_arbiter(line: socket.socket, lease: Path) -> None:
    """Connects through a descriptor of the lease's folder, because the folder's path may be longer than a
    socket's address.
    """
    folder = os.open(lease, os.O_PATH)
    try:
        line.connect(f"/proc/self/fd/{folder}/{layout.ARBITER_SOCKET}")
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Tenant:
    """Runs processes in a lease, with libvgpu preloaded and the fake driver as libcuda."""

    lease: Path | None
    libvgpu: tuple[Path, ...] = (LIBVGPU,)

    def env(self, **more: str) -> dict[str, str]:
        env = {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": ":".join(map(str, self.libvgpu)),
            "LD_LIBRARY_PATH": f"{DRIVER}:{TEST_BUILD}",
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0",
        }
        if self.lease is not None:
            env["VGPU_LEASE"] = str(self.lease)
        return env | more

    def start(self, *command: str | Path, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.env(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(part) for part in command],
            env=self.env(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

"""Fixtures for the arbiter's time slices, with simulated devices and real processes."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import eventually
from tests.simnode import SimNode, build_dir, create, end
from vgpud import lease_layout as layout
from vgpud.lease import (
    ArbiterClient,
    DeviceLimits,
    SharePolicy,
    read_limits,
    update_limits,
    write_lease,
)

KERNEL_US = 1000
LONG = 900.0  # seconds: longer than any test
GIB = 1 << 30


@dataclass
class Card:
    """Two simulated devices, an arbiter, and tenants whose kernels, usually of 1 ms, occupy the devices."""

    sim: SimNode
    run_dir: Path
    uuids: tuple[str, ...]
    arbiter: "subprocess.Popen[bytes] | None" = None
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)
    preloads: tuple[Path, ...] = ()  # libraries that tenants preload besides libvgpu
    kernel_us: int = KERNEL_US
    engine: str = "gate"

    @property
    def client(self) -> ArbiterClient:
        return ArbiterClient(self.run_dir / "arbiter" / "control.sock")

    def start_arbiter(self, *wrapper: str) -> None:
        arbiter = self.sim.build / "bin" / "vgpu-arbiter"
        command = [*wrapper, str(arbiter), "--run-dir", str(self.run_dir), "--foreground"]
        command += ["--control-device", str(self.sim.state)]
        (self.run_dir / "engines").mkdir(exist_ok=True)
        for uuid in self.uuids:
            (self.run_dir / "engines" / uuid).write_text(f"{self.engine}\n")
        self.arbiter = subprocess.Popen(command, env=self.sim.environment())
        eventually(self.client.ready, "the arbiter serves")

    def kill_arbiter(self) -> None:
        assert self.arbiter is not None
        self.arbiter.kill()
        self.arbiter.wait()

    def limits(
        self, policy: SharePolicy, share: float, devices: int = 1, first: int = 0
    ) -> list[DeviceLimits]:
        uuids = self.uuids[first : first + devices]
        return [DeviceLimits(uuid, 8 * GIB, int(share * 100), policy) for uuid in uuids]

    def lease(
        self,
        name: str,
        policy: SharePolicy,
        share: float,
        devices: int = 1,
        priority: int = 0,
        first_device: int = 0,
    ) -> Path:
        limits = [replace(d, priority=priority) for d in self.limits(policy, share, devices, first_device)]
        folder = write_lease(self.run_dir / "leases", name, limits, uid=os.getuid(), gid=os.getgid())
        if self.arbiter is not None:
            self.client.add(name)
        return folder

    def change(self, lease: Path, policy: SharePolicy, share: float) -> None:
        update_limits(lease, self.limits(policy, share))
        self.client.add(lease.name)

    def spin(
        self, lease: Path, seconds: float, *words: str, around: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        """Starts vgpu-spin in the lease. `around` is a command that runs it, for example `unshare`."""
        asked = ("--kernel-us", str(self.kernel_us), "--seconds", str(seconds), *words)
        return self.program("vgpu-spin", lease, *asked, around=around)

    def program(
        self, name: str, lease: Path, *words: str, around: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        env = self.tenant_variables(lease)
        if name == "vgpu-spin":
            env["VGPU_SIM_KERNEL_US"] = str(self.kernel_us)
        command = [*around, str(self.sim.build / "bin" / name), *words]
        process = subprocess.Popen(
            command, env=self.sim.environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def tenant_variables(self, lease: Path) -> dict[str, str]:
        return {
            "LD_PRELOAD": ":".join(map(str, (self.sim.build / "lib" / "libvgpu.so", *self.preloads))),
            "VGPU_LEASE": str(lease),
            "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in read_limits(lease).devices),
        }

    def end(self) -> None:
        for process in self.processes:
            end(process)
        if self.arbiter is not None:
            end(self.arbiter)


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out + error
    line: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return line


def counters(lease: Path, ordinal: int = 0) -> dict[str, int]:
    at = layout.USAGE_COMPUTE + ordinal * layout.COMPUTE_SIZE
    raw = (lease / layout.USAGE_FILE).read_bytes()[at:]
    names = ("granted_ns", "used_ns", "waited_ns", "overrun_ns", "turns", "bypasses")
    return dict(zip(names, struct.unpack_from("<6Q", raw), strict=True))


@contextmanager
def made_card(engine: str = "gate") -> Iterator[Card]:
    folder = Path(tempfile.mkdtemp())  # a short path, because a socket's path has at most 108 bytes
    (folder / "run" / "leases").mkdir(parents=True)
    sim = SimNode(folder / "state", build_dir(), "h200x8")
    create(sim.state, sim.profile)
    made = Card(sim, folder / "run", tuple(one["uuid"] for one in sim.dump()["devices"][:2]))
    made.engine = engine
    made.start_arbiter()
    try:
        yield made
    finally:
        made.end()
        sim.stop()
        shutil.rmtree(folder)


@pytest.fixture
def card() -> Iterator[Card]:
    with made_card() as made:
        yield made


@pytest.fixture
def cut_card() -> Iterator[Card]:
    with made_card("cut") as made:
        yield made

"""`python -m tests.packaging.cross`: cross-builds the packages for 64-bit ARM and runs them by emulation.

It is not part of the suite, because the build alone takes a minute on one core. The programs run under
qemu-user: the arbiter, the simulated driver, and a tenant that registers with libvgpu and sees its limit. No
GPU memory is allocated, because the simulated driver would reserve 4 TiB of addresses, and qemu 7.2 needs
host memory for each of their pages.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.packaging.debs import NAMES, field, one
from tests.packaging.tools import WORK, lacking
from tests.simnode import ROOT
from vgpud.lease import ArbiterClient, DeviceLimits, write_lease

QEMU = "qemu-aarch64-static"
COMPILER = "aarch64-linux-gnu-gcc"
TRIPLET = "aarch64-linux-gnu"
MIB = 1 << 20
LIMIT_BYTES = 2048 * MIB


def build() -> Path:
    out = WORK / "arm64"
    words = [sys.executable, str(ROOT / "packaging/deb/build.py"), "--out", str(out), "--arch", "arm64"]
    environment = {**os.environ, "DEB_BUILD_OPTIONS": "noautodbgsym"}
    subprocess.run([*words, "--system-compiler"], env=environment, check=True, timeout=900)
    return out


def emulated(program: Path, **environment: str) -> list[str]:
    more = [word for key, value in environment.items() for word in ("-E", f"{key}={value}")]
    return [QEMU, "-L", f"/usr/{TRIPLET}", *more, str(program)]


class Arm:
    """The unpacked ARM packages, and a simulated node made with their programs."""

    def __init__(self, debs: Path, folder: Path) -> None:
        self.root = folder
        for name in NAMES:
            subprocess.run(["dpkg-deb", "-x", str(one(debs, name)), str(folder)], check=True)
        self.sim = folder / "usr/lib/vgpud-sim"
        self.libvgpu = folder / f"usr/lib/{TRIPLET}/vgpud/libvgpu.so"
        program = self.sim / "bin" / "vgpu-simctl"
        real = program.rename(program.with_suffix(".arm64"))
        program.write_text(f'#!/bin/sh\nexec {" ".join(emulated(real))} "$@"\n')
        program.chmod(0o755)
        location = {"prefix": str(self.sim), "profiles": str(folder / "usr/share/vgpud-sim/profiles")}
        (self.sim / "python/vgpu_sim/location.json").write_text(json.dumps(location))

    def probe(self, *words: str, lease: Path | None = None) -> list[dict[str, object]]:
        """Runs vgpu-probe on the node and returns its lines."""
        environment = {"LD_LIBRARY_PATH": str(self.sim / "lib")}
        if lease is not None:
            environment |= {"LD_PRELOAD": str(self.libvgpu), "VGPU_LEASE": str(lease)}
        node = ["run", "--profile", "h200x8", "--state", str(self.root / "node"), "--"]
        tried = [*emulated(self.sim / "bin" / "vgpu-probe", **environment), *words]
        done = subprocess.run(
            [sys.executable, "-m", "vgpu_sim", *node, *tried],
            env={**os.environ, "PYTHONPATH": str(self.sim / "python")},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.stdout, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def arbiter(self, run_dir: Path) -> "subprocess.Popen[bytes]":
        (run_dir / "leases").mkdir(parents=True)
        program = emulated(self.root / "usr/lib/vgpud/vgpu-arbiter")
        process = subprocess.Popen([*program, "--run-dir", str(run_dir), "--foreground"])
        client = ArbiterClient(run_dir / "arbiter" / "control.sock")
        end = time.monotonic() + 30
        while not client.ready():
            assert time.monotonic() < end and process.poll() is None, "the arbiter is not ready"
            time.sleep(0.05)
        return process


def try_out(arm: Arm) -> None:
    """Runs the emulated arbiter and libvgpu. A tenant sees its limit as the device's memory."""
    bare = arm.probe("info")[-1]
    print(f"a simulated node: {bare['count']} x {bare['name']}, {bare['total_bytes']} bytes each")
    run_dir = arm.root / "run"
    arbiter = arm.arbiter(run_dir)
    try:
        limits = [DeviceLimits(f"GPU-{bare['uuid']}", LIMIT_BYTES)]
        lease = write_lease(run_dir / "leases", "a1", limits, uid=0, gid=0)
        ArbiterClient(run_dir / "arbiter" / "control.sock").add("a1")
        seen = arm.probe("info", lease=lease)[-1]
    finally:
        arbiter.kill()
        arbiter.wait()
    assert (bare["libvgpu"], seen["libvgpu"], seen["total_bytes"]) == (False, True, LIMIT_BYTES), seen
    assert 0 < int(str(seen["free_bytes"])) < LIMIT_BYTES, "its context takes a part"
    print(f"a tenant's card: {seen['total_bytes']} bytes, {seen['free_bytes']} of them free")


def main() -> int:
    if reason := lacking(COMPILER, QEMU):
        print(f"not tried: {reason}")
        return 1
    debs = build()
    for name in NAMES:
        depends = field(one(debs, name), "Depends")
        assert field(one(debs, name), "Architecture") == "arm64"
        assert "cross" not in depends and ":arm64" not in depends, depends
    with tempfile.TemporaryDirectory(prefix="arm-") as folder:
        try_out(Arm(debs, Path(folder)))
    print("1 passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

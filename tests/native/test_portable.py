"""The portable build of libvgpu, for old C libraries and ARM64, made with Zig: it builds, and needs no symbol
newer than glibc 2.17.

test_symbols.py checks the libraries that ./dev build makes without Zig.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.native.harness import ROOT
from tests.sim import outside


@pytest.fixture(scope="module")
def zig() -> Path:
    """A folder for PYTHONPATH with Zig, from the package index that pip uses."""
    folder = outside.zig()
    if folder is None:
        unmet("python-index", outside.why["zig"])
    return folder


@needs("python-index")
def test_the_portable_build_makes_libvgpu_for_x86_64_and_aarch64(tmp_path: Path, zig: Path) -> None:
    for machine, name in (("x86_64", "X86-64"), ("aarch64", "AArch64")):
        script = ROOT / "native/libvgpu/portable.py"
        out = tmp_path / machine
        command = [sys.executable, str(script), "--machine", machine, "--out", str(out)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(zig)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        header = subprocess.run(
            ["readelf", "-h", out / "libvgpu.so"], capture_output=True, text=True, check=True
        )
        assert name in header.stdout

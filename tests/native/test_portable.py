"""libvgpu for old C libraries and the other processor: builds, and asks for no glibc after 2.17."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.harness import ROOT


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs Zig: pip install ziglang")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_portable_build(tmp_path: Path, machine: str) -> None:
    script = ROOT / "native/libvgpu/portable.py"
    command = [sys.executable, str(script), "--machine", machine, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    header = subprocess.run(
        ["readelf", "-h", tmp_path / "libvgpu.so"], capture_output=True, text=True, check=True
    )
    assert {"x86_64": "X86-64", "aarch64": "AArch64"}[machine] in header.stdout

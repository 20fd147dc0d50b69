"""The simulator is a project of its own: it is configured and built without the rest of the native parts."""

import subprocess
from pathlib import Path

from tests.sim.test_sanitizers import cached
from tests.simnode import BUILD, ROOT


def test_the_simulator_builds_alone(tmp_path: Path) -> None:
    includes = [f"-D{name}={cached(BUILD, name)}" for name in ("VGPU_CUDA_INCLUDE", "VGPU_NVML_INCLUDE")]
    configure = ["cmake", "-S", str(ROOT / "native/sim"), "-B", str(tmp_path), "-G", "Ninja", *includes]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path), "-j2"], check=True, capture_output=True)
    assert (tmp_path / "lib" / "libcuda.so.1").exists()
    assert (tmp_path / "bin" / "vgpu-sim").exists()

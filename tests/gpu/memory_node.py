"""Shared by the memory programs of this folder: paths, a running arbiter, leases, NVML's figures.

Each of them is run as `python -m tests.gpu.NAME --build FOLDER --out FILE [PART ...]`: FOLDER is the native
build, FILE gets the figures as JSON. They need a free GPU, cc and cuda.h, and change no setting.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from vgpud.lease import ArbiterClient, DeviceLimits, Usage, write_lease

HERE = Path(__file__).parent
FAMILIES = ("alloc", "pitch", "managed", "vmm", "async", "pool", "array", "array3d", "mipmap", "graph")
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Bench:
    """Paths, and one running arbiter."""

    libvgpu: Path
    programs: Path
    run_dir: Path
    uuid: str

    def lease(self, name: str, memory_bytes: int) -> Path:
        folder = write_lease(
            self.run_dir / "leases", name, [DeviceLimits(self.uuid, memory_bytes)], os.getuid(), os.getgid()
        )
        ArbiterClient(self.run_dir / "arbiter" / "control.sock").add(name)
        return folder

    def env(self, lease: Path | None, **more: str) -> dict[str, str]:
        env = dict(os.environ) | more
        if lease is not None:
            env |= {"LD_PRELOAD": str(self.libvgpu), "VGPU_LEASE": str(lease)}
        return env

    def program(self, name: str) -> Path:
        return self.programs / name

    def run(
        self, lease: Path | None, *command: str | Path, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(part) for part in command],
            env=self.env(lease, **more),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def start(self, lease: Path | None, *command: str | Path, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(part) for part in command],
            env=self.env(lease, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def nvml_bytes(uuid: str) -> dict[int, int]:
    """Memory of each compute process, as NVML reports it."""
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return {p.pid: p.usedGpuMemory or 0 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}


def step(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Returns the lines that a program prints until it waits for input."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(json.loads(line))
        if "at" in said[-1]:
            break
    return said


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def ledger_bytes(usage: Usage) -> int:
    meter = usage.device(0)
    return meter.used_bytes + meter.context_bytes


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def programs(out: Path) -> None:
    """Compiles the programs into this folder."""
    for name in ("memory_bench", "memory_families", "graph_memory"):
        command = ["cc", "-O2", "-I/usr/local/cuda/include", str(HERE / f"{name}.c"), "-o", str(out / name)]
        libraries = ["-L/usr/local/cuda/lib64/stubs", "-L/usr/local/nvidia/lib64", "-l:libcuda.so.1", "-ldl"]
        done = subprocess.run(command + libraries, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            libraries[2] = "-lcuda"
            subprocess.run(command + libraries, check=True)


@contextmanager
def arbiter(program: Path, run_dir: Path) -> Iterator[None]:
    (run_dir / "leases").mkdir(parents=True)
    process = subprocess.Popen([program, "--run-dir", run_dir, "--foreground"], stderr=subprocess.DEVNULL)
    client = ArbiterClient(run_dir / "arbiter" / "control.sock")
    while not client.ready():
        time.sleep(0.01)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(about: str, parts: Mapping[str, Callable[[Bench], Any]]) -> int:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder of the native build")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--programs", type=Path, help="folder of programs that `programs` has made; made if none is named"
    )
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all, if none is named")
    options = parser.parse_args()
    build: Path = options.build.resolve()
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.programs is None:
            programs(Path(folder))
        with arbiter(build / "bin" / "vgpu-arbiter", Path(folder) / "run"):
            made = options.programs or Path(folder)
            bench = Bench(build / "lib" / "libvgpu.so", made, Path(folder) / "run", uuid)
            for part in options.parts or parts:
                began = time.monotonic()
                try:
                    figures[part] = parts[part](bench)
                except Exception as error:
                    figures[part] = {"broke": repr(error)}
                print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)
                options.out.write_text(json.dumps(figures, indent=1))
    return int(any("broke" in figure for figure in figures.values() if isinstance(figure, dict)))

"""Rare behaviour of programs, on a real GPU.

    python -m tests.gpu.edges_h200 [--engine cut|gate] [--build DIR] [--programs DIR] [PART ...]

Contexts that end and begin again, more of them than a table has, thread-local storage, closed standard
streams, the lease's descriptors closed, forks, an exec, cancelled threads, one cuMemUnmap over mappings of
two kinds: each alone on the device, under a memory limit and a hard share of 20 %, with libvgpu preloaded.
The programs are context_cycles.c, edges.c and strangers.c (build/native-tests). Each line has the expected
and the measured value. The exit status is the number of wrong ones. The parts are `programs`, `off` (forks
and an exec while the tenant is off the device: only under engine `cut`), `streams` and `closed` (half a
minute together), `cycles` and `live` (contexts; a minute and a half each); without one, all. No setting of
the device is changed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.compute_h200 import all_off, until
from vgpud.lease import ArbiterClient, DeviceLimits, SharePolicy, write_lease

ROOT = Path(__file__).resolve().parents[2]
SHARE = 20
NEAR = 6  # percent: the share, and the allowed error for a program that restarts repeatedly
KERNEL_US = 500
GIB = 1 << 30
SECONDS_MOST = 100
CYCLES = (("reset", 200, 20), ("release", 40, 8), ("destroy", 40, 8), ("green", 20, 6))
FORKS = 20
LIVE = (30, 36, 60)
LIVE_SECONDS = 20  # a round of a tenant of many contexts takes half a second


@dataclass
class Machine:
    build: Path
    programs: Path
    run_dir: Path
    uuid: str
    wrong: int = 0
    leases: int = 0

    def lease(self, policy: SharePolicy, memory_bytes: int = 48 * GIB) -> Path:
        self.leases += 1
        name = f"a{self.leases}"
        devices = [DeviceLimits(self.uuid, memory_bytes, SHARE * 100, policy)]
        folder = write_lease(self.run_dir / "leases", name, devices, uid=os.getuid(), gid=os.getgid())
        ArbiterClient(self.run_dir / "arbiter" / "control.sock").add(name)
        return folder

    def environment(self, lease: Path | None) -> dict[str, str]:
        if lease is None:
            return dict(os.environ)
        return os.environ | {"LD_PRELOAD": str(self.build / "lib" / "libvgpu.so"), "VGPU_LEASE": str(lease)}

    def run(
        self, lease: Path | None, *words: str, program: str = "edges"
    ) -> "subprocess.CompletedProcess[str]":
        env = self.environment(lease)
        command = [str(self.programs / program), *words]
        try:
            return subprocess.run(
                command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS_MOST, input="x"
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, -1, "", f"it did not end within {SECONDS_MOST} s")

    def say(self, what: str, right: bool, figure: str) -> None:
        self.wrong += not right
        print(f"{'right' if right else 'WRONG'}  {what}: {figure}", flush=True)


def contexts(machine: Machine, asked: list[tuple[str, int, int]]) -> None:
    rate = float(machine.run(None, "calibrate", program="context-cycles").stdout)
    iterations = str(int(rate * KERNEL_US))
    for how, count, seconds in asked:
        one(machine, None, iterations, how, count if how == "live" else count // 10, 2)
        one(machine, SharePolicy.NONE, iterations, how, count if how == "live" else count // 10, 2)
        one(machine, SharePolicy.HARD, iterations, how, count, seconds)


def cycles(machine: Machine) -> None:
    contexts(machine, list(CYCLES))


def live(machine: Machine) -> None:
    contexts(machine, [("live", n, LIVE_SECONDS) for n in LIVE])


def one(
    machine: Machine, policy: SharePolicy | None, iterations: str, how: str, count: int, seconds: int
) -> None:
    lease = machine.lease(policy) if policy is not None else None
    words = (how, str(count), str(seconds), str(KERNEL_US), iterations)
    done = machine.run(lease, *words, program="context-cycles")
    percent = json.loads(done.stdout)["percent"] if done.returncode == 0 else -1.0
    name = "native" if policy is None else policy.name.lower()
    figure = f"{percent} % of the device" if percent >= 0 else f"{done.returncode} {done.stderr.strip()}"
    right = 0 <= percent <= (SHARE + NEAR if policy is SharePolicy.HARD else 1000)
    machine.say(f"{count} contexts, {how}, {name}", right, figure)


def programs(machine: Machine) -> None:
    for way, program in (
        ("launch", "edges"),
        ("launch", "edges120000"),
        ("launch", "edges1048576"),
        ("fork", "edges"),
        ("cancel", "edges"),
        ("unmap", "edges"),
    ):
        done = machine.run(machine.lease(SharePolicy.HARD), way, program=program)
        machine.say(f"{program} {way}", done.returncode == 0, f"{done.returncode} {done.stderr.strip()}")


def off(machine: Machine) -> None:
    """A process of two threads that forks and executes another program while it is off the device."""
    lease = machine.lease(SharePolicy.HARD)
    env = machine.environment(lease)
    command = [str(machine.programs / "edges"), "busy"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        forks = 0
        for order in "f" * FORKS + "e":
            until(lambda: all_off(lease, 1), "it is off the device", pause=0)
            process.stdin.write(order)
            process.stdin.flush()
            forks += order == "f" and process.stdout.readline() == "forked\n"
        error = process.communicate(timeout=SECONDS_MOST)[1].strip()
    figure = f"{forks} forks, then {process.returncode} {error}"
    machine.say("fork and exec while off the device", forks == FORKS and process.returncode == 0, figure)


def streams(machine: Machine) -> None:
    for closed in ("0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"):
        lease, verdict = machine.lease(SharePolicy.HARD), machine.run_dir / "verdict"
        verdict.unlink(missing_ok=True)
        env = machine.environment(lease)
        command = f"exec {machine.programs / 'edges'} stdio {verdict} {closed}"
        subprocess.run(["bash", "-c", command], env=env, check=False, timeout=60, capture_output=True)
        said = verdict.read_text().strip() if verdict.exists() else "nothing"
        machine.say(f"started with {closed}", said == "right", said)


def closed(machine: Machine) -> None:
    lease = machine.lease(SharePolicy.HARD, 2 * GIB)
    done = machine.run(lease, "closefrom", str(lease), program="strangers")
    figure = f"{done.returncode} {done.stderr.strip()}"
    machine.say("the lease's files closed before each call", done.returncode == 0, figure)


@contextmanager
def machine_of(build: Path, tests: Path, engine: str) -> Iterator[Machine]:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    uuid = listed.split("UUID: ")[1].split(")")[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "leases").mkdir()
        (Path(folder) / "engines").mkdir()
        (Path(folder) / "engines" / uuid).write_text(f"{engine}\n")
        command = [str(build / "bin" / "vgpu-arbiter"), "--run-dir", folder, "--foreground"]
        arbiter = subprocess.Popen(command)
        while not ArbiterClient(Path(folder) / "arbiter" / "control.sock").ready():
            time.sleep(0.01)
        try:
            yield Machine(build, tests, Path(folder), uuid)
        finally:
            arbiter.kill()
            arbiter.wait()


PARTS = {part.__name__: part for part in (programs, off, streams, closed, cycles, live)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "native")
    parser.add_argument("--programs", type=Path, default=ROOT / "build" / "native-tests")
    parser.add_argument("--engine", choices=("cut", "gate"), default="cut", help="that keeps the time slices")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if none is named")
    words = parser.parse_args()
    with machine_of(words.build, words.programs, words.engine) as machine:
        for part in words.parts or [p for p in PARTS if words.engine == "cut" or p != "off"]:
            PARTS[part](machine)
    return machine.wrong


if __name__ == "__main__":
    sys.exit(main())

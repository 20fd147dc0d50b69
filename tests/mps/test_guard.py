"""The guard in a tenant's process: it refuses CUDA without a control daemon, and holds the process to its
limits.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.e2e.support import eventually
from tests.mps.conftest import control_program
from tests.native.harness import TEST_BUILD
from tests.otheruser import open_folder
from tests.simnode import SimNode, sim_node  # noqa: F401
from vgpud.model.quantity import MIB, Percent
from vgpud.model.tenancy import ANYONE, Mode, Slice
from vgpud.modes.mps.folders import write_tenant
from vgpud.modes.mps.rules import MpsRules

Make = Callable[..., SimNode]
REFUSED = "CUDA_ERROR_MPS_CONNECTION_FAILED"
FULL = "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"
WAYS = ("direct", "dlsym", "proc")


class Node:
    """A simulated node, a control daemon that the test starts and kills, and programs that load the guard."""

    def __init__(self, sim: SimNode, folder: Path, guard: Path) -> None:
        self.sim, self.guard = sim, guard
        self.pipe = folder / "p"
        self.env = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "l"),
        }
        self.daemon: subprocess.Popen[str] | None = None

    def start_daemon(self, program: str = "nvidia-cuda-mps-control") -> None:
        self.pipe.mkdir(exist_ok=True)
        self.daemon = self.sim.start([program, "-f"], self.env)
        eventually(self.accepts, "it accepts connections")

    def accepts(self) -> bool:
        """Returns whether the daemon accepts connections. Its socket exists earlier than that."""
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            with socket.socket(socket.AF_UNIX, kind) as one, contextlib.suppress(OSError):
                one.connect(str(self.pipe / "control"))
                return True
        return False

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def guarded(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        return {**self.env, "LD_PRELOAD": str(self.guard), **(extra or {})}

    def probe(self, *words: str, extra: dict[str, str] | None = None) -> tuple[str, str]:
        """Runs vgpu-probe. Returns the result in its last line, and its standard error."""
        program = str(self.sim.build / "bin" / "vgpu-probe")
        done = self.sim.run([program, *words], self.guarded(extra), check=False)
        return json.loads(done.stdout.splitlines()[-1])["result"], done.stderr

    def holding(self, extra: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a program that allocates memory and then waits."""
        program = str(self.sim.build / "bin" / "vgpu-probe")
        made = self.sim.start([program, "hold", "1MiB", "--then-wait-on-stdin"], self.guarded(extra))
        assert made.stdout is not None
        assert '"held"' in made.stdout.readline()
        return made


@pytest.fixture
def node(sim_node: Make, short_folder: Path, guard: Path) -> Iterator[Node]:  # noqa: F811
    yield Node(sim_node(), short_folder, guard)


@pytest.mark.parametrize("way", WAYS)
def test_cuda_is_refused_without_an_mps_daemon(node: Node, way: str) -> None:
    result, said = node.probe("--via", way, "hold", "1MiB")
    assert result == REFUSED
    assert len(said.splitlines()) == 1
    assert str(node.pipe) in said


@pytest.mark.parametrize("way", WAYS)
def test_the_guard_allows_cuda_while_an_mps_daemon_runs(node: Node, way: str) -> None:
    node.start_daemon()
    assert node.probe("--via", way, "ok") == ("CUDA_SUCCESS", "")


OLD_LOOKUP = """
import ctypes as c
cuda, found = c.CDLL("libcuda.so.1"), c.c_void_p()
print(cuda.cuGetProcAddress(b"cuNone", c.byref(found), 11030, c.c_uint64(0)))
assert cuda.cuGetProcAddress(b"cuInit", c.byref(found), 11030, c.c_uint64(0)) == 0
print(c.CFUNCTYPE(c.c_int, c.c_uint)(found.value)(0))
"""


def test_the_look_up_of_cuda_11_finds_the_functions_of_the_guard(node: Node) -> None:
    """cuGetProcAddress without _v2, which programs that were built with CUDA 11 call."""
    done = node.sim.run([sys.executable, "-c", OLD_LOOKUP], node.guarded())
    assert done.stdout.split() == ["500", "805"], "CUDA_ERROR_NOT_FOUND and CUDA_ERROR_MPS_CONNECTION_FAILED"


def test_a_program_without_the_guard_runs_without_limits(node: Node) -> None:
    """While the MPS daemon is down, a program without the guard starts: the driver reports no error and
    enforces no limits.
    """
    assert node.probe("hold", "1MiB", extra={"LD_PRELOAD": ""})[0] == "CUDA_SUCCESS"


def test_programs_are_refused_between_the_death_of_the_mps_daemon_and_its_restart(node: Node) -> None:
    node.start_daemon()
    assert node.probe("hold", "1MiB")[0] == "CUDA_SUCCESS"
    node.kill_daemon()
    assert (node.pipe / "control").exists(), "the stale socket is what makes this a trap"
    assert node.probe("hold", "1MiB")[0] == REFUSED
    (node.pipe / "control").unlink()
    node.start_daemon()
    assert node.probe("hold", "1MiB")[0] == "CUDA_SUCCESS"


def test_an_unset_pipe_folder_does_not_bypass_the_guard(node: Node) -> None:
    """If the variable for the pipe folder is unset, the driver uses its default folder, and so does the
    guard.
    """
    assert not Path("/tmp/nvidia-mps/control").exists()
    program = str(node.sim.build / "bin" / "vgpu-probe")
    argv = ["env", "-u", "CUDA_MPS_PIPE_DIRECTORY", program, "hold", "1MiB"]
    done = node.sim.run(argv, node.guarded(), check=False)
    assert REFUSED in done.stdout


@needs("debian-archive")
@pytest.mark.parametrize("branch", ["535", "550"])
def test_the_guard_recognises_the_socket_of_nvidias_mps_daemon(node: Node, branch: str) -> None:
    """NVIDIA's daemon has a SEQPACKET socket, and the simulator's daemon a STREAM socket."""
    node.start_daemon(control_program(branch))
    assert node.probe("hold", "1MiB")[0] == "CUDA_SUCCESS"
    node.kill_daemon()
    assert node.probe("hold", "1MiB")[0] == REFUSED


DURING = {
    "stays": ("true", "0"),
    "dies": ("kill -9 $OLD && sleep 0.1", "805"),
    "is replaced": (
        "kill -9 $OLD && sleep 0.1 && rm $CUDA_MPS_PIPE_DIRECTORY/control && nvidia-cuda-mps-control -d",
        "805",
    ),
}


@pytest.mark.parametrize("fate", DURING)
def test_the_guard_notices_a_daemon_that_dies_during_cuinit(node: Node, fate: str) -> None:
    """The daemon dies during cuInit. The driver may have found no daemon, and the process would then have no
    limit.
    """
    node.start_daemon()
    assert node.daemon is not None
    library = TEST_BUILD / "slow" / "libcuda.so.1"
    script, expected = DURING[fate]
    code = f"import ctypes; u = ctypes.CDLL({str(library)!r}); print(u.cuInit(0), u.cuInit(0))"
    env = {"DURING": script, "OLD": str(node.daemon.pid)}
    done = node.sim.run(["/usr/bin/python3", "-c", code], node.guarded(env), check=False)
    first, second = done.stdout.split()
    assert first == expected
    assert fate == "stays" or second == "805", "once out, out for good"
    node.sim.run(["sh", "-c", "echo quit | nvidia-cuda-mps-control"], node.env, check=False)


# --- one tenant, several processes


@pytest.fixture
def tenant(short_folder: Path) -> Path:
    return short_folder / "t" / "a"


def hold_to(tenant: Path, mebibytes: int, percent: int, processes: int) -> dict[str, str]:
    part = Slice("GPU-0", Mode.MPS, mebibytes * MIB, Percent(percent * 100))
    write_tenant(tenant, part, MpsRules(processes_per_tenant=processes), os.getuid())
    return {"VGPU_MPS_TENANT": str(tenant)}


def filled(node: Node, extra: dict[str, str]) -> int:
    program = str(node.sim.build / "bin" / "vgpu-probe")
    done = node.sim.run([program, "fill", "--piece", "16MiB"], node.guarded(extra), check=False)
    return int(json.loads(done.stdout.splitlines()[-1])["total_bytes"])


def test_limits_of_an_mps_tenant_hold_against_its_environment(node: Node, tenant: Path) -> None:
    node.start_daemon()
    env = hold_to(tenant, 2048, 50, 1)
    usual = filled(node, env)
    assert 0 < usual < 2048 * MIB
    assert filled(node, {**env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64G"}) == usual
    assert filled(node, {**env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "nonsense"}) == usual
    assert 0 < filled(node, {**env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}) < usual


def test_processes_of_a_tenant_share_its_limit(node: Node, tenant: Path) -> None:
    node.start_daemon()
    env = hold_to(tenant, 2048, 50, 2)
    first, second = node.holding(env), node.holding(env)
    result, said = node.probe("hold", "1MiB", extra=env)
    assert result == FULL
    assert len(said.splitlines()) == 1
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert node.probe("hold", "1MiB", extra=env)[0] == "CUDA_SUCCESS", "what the dead one had is free at once"
    second.kill()
    second.wait()


def test_a_process_may_lower_its_own_limit(node: Node, tenant: Path) -> None:
    node.start_daemon()
    env = hold_to(tenant, 3000, 60, 1)
    less = {**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1000M"}
    holding = [node.holding(less) for _ in range(3)]
    assert node.probe("hold", "1MiB", extra=less)[0] == FULL
    for one in holding:
        one.kill()
        one.wait()
    assert node.probe("hold", "1MiB", extra=env)[0] == "CUDA_SUCCESS"


def test_the_limits_of_two_mps_tenants_are_independent(node: Node, tenant: Path) -> None:
    node.start_daemon()
    one, other = hold_to(tenant, 1024, 10, 1), hold_to(tenant.with_name("b"), 1024, 10, 1)
    held = node.holding(one)
    assert node.probe("hold", "1MiB", extra=other)[0] == "CUDA_SUCCESS"
    assert node.probe("hold", "1MiB", extra=one)[0] == FULL
    held.kill()
    held.wait()


TRIES = """
import os, sys
uid, folder = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
def can(name, flags):
    try:
        os.close(os.open(folder + name, flags))
    except OSError:
        return False
    return True
opened = {"reads": can("/limits", os.O_RDONLY), "writes": can("/limits", os.O_RDWR)}
opened["creates"] = can("/new", os.O_CREAT | os.O_WRONLY)
print(*(way for way, done in opened.items() if done))
"""


@needs("root")
def test_a_tenant_can_write_no_file_of_the_run_folder_and_other_users_can_reach_none() -> None:
    """Otherwise a tenant could put a file of any size in place of its `slots`, and every user of the host
    could write and lock the `slots` of a pod's tenant.
    """
    part = Slice("GPU-0", Mode.MPS, 1024 * MIB, Percent(1000))

    def opened(uid: int, folder: Path) -> str:
        words = [sys.executable, "-c", TRIES, str(uid), str(folder)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    with open_folder() as run:
        own = write_tenant(run / "mps" / "t" / "a", part, MpsRules(), 4242)
        pods = write_tenant(run / "mps" / "t" / "b", part, MpsRules(), ANYONE)
        assert (opened(4242, own), opened(4343, own)) == ("reads", "")
        assert (opened(4242, pods), opened(0, pods)) == ("", "reads writes creates")
        assert pods.stat().st_mode & 0o777 == 0o711, "a pod's programs, of any uid, have this folder mounted"


@pytest.mark.parametrize("damage", ["gone", "empty", "words"])
def test_cuda_is_refused_if_the_limits_cannot_be_read(node: Node, tenant: Path, damage: str) -> None:
    """A released allocation has no limits file. A program that starts later with its environment must be
    refused.
    """
    node.start_daemon()
    env = hold_to(tenant, 1024, 10, 1)
    limits = tenant / "limits"
    if damage == "gone":
        limits.unlink()
    else:
        limits.write_text("" if damage == "empty" else "all of it\n")
    assert node.probe("hold", "1MiB", extra=env)[0] == REFUSED


def test_the_guard_needs_no_symbol_newer_than_glibc_2_17(guard: Path) -> None:
    """ld.so skips a guard that it cannot load, with a warning only. The tenant would then run without the
    guard.
    """
    shown = subprocess.run(["objdump", "-T", guard], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", shown)}
    assert versions
    assert max(versions) <= (2, 17)


def test_programs_without_cuda_are_unaffected(guard: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", "ls / >/dev/null && echo well"],
        env={"LD_PRELOAD": str(guard), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("well\n", "")

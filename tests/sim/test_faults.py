"""Injected faults, a driver that changes under running programs, and the launcher vgpu-sim."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.tenant import Tenant
from tests.simnode import ROOT, SimNode, build_dir

Make = Callable[..., SimNode]

NAME = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\ntry:\n    print(n.nvmlDeviceGetName(h))\nexcept n.NVMLError as e:\n    print('error', e.value)"


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


def test_a_function_set_to_hang_returns_once_the_faults_are_cleared(node: SimNode) -> None:
    node.sim("fault", "hang", "--function", "nvmlDeviceGetName")
    asking = node.start([sys.executable, "-c", f"print('asks', flush=True)\n{NAME}"])
    assert asking.stdout is not None
    assert asking.stdout.readline() == "asks\n"
    other = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)))"
    assert node.python(other).startswith("GPU-")  # the other process does not hang
    assert asking.poll() is None
    node.sim("fault", "clear")
    assert asking.communicate(timeout=300)[0] == "NVIDIA H200\n"


def test_the_faults_of_one_device_are_cleared_alone(sim_node: Make) -> None:
    node = sim_node("h200x8")
    for index in ("2", "3"):
        node.sim("fault", "recovery", "--device", index, "--code", "1")
        node.sim("fault", "fail", "--function", "nvmlDeviceGetName", "--device", index)
    node.sim("fault", "clear", "--device", "3")
    asked = "import pynvml as n; n.nvmlInit()\nfor i in (2, 3):\n    h = n.nvmlDeviceGetHandleByIndex(i)\n    v = n.nvmlDeviceGetFieldValues(h, [230])[0].value.uiVal\n    try:\n        print(v, n.nvmlDeviceGetName(h))\n    except n.NVMLError as e:\n        print(v, 'error')"
    assert node.python(asked).splitlines() == ["1 error", "0 NVIDIA H200"]


def test_a_hanging_process_can_be_killed(node: SimNode) -> None:
    tenant = Tenant(node)
    tenant.say("alloc 100")
    node.sim("fault", "hang", "--function", "cuCtxSynchronize")
    assert tenant.process.stdin is not None
    tenant.process.stdin.write("sync\n")
    tenant.process.stdin.flush()
    assert node.dump()["devices"][0]["memory_used"] > 0
    tenant.kill()
    assert node.dump()["devices"][0]["memory_used"] == 0


def test_a_function_set_to_be_slow_answers_late(node: SimNode) -> None:
    node.sim("fault", "slow", "--function", "nvmlDeviceGet*", "--microseconds", "150000", "--count", "3")
    code = "import time, pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\nfor _ in range(3):\n    t = time.monotonic(); n.nvmlDeviceGetTemperature(h, 0); print(time.monotonic() - t)"
    took = [float(word) for word in node.python(code).split()]
    assert took[0] >= 0.15 and took[1] >= 0.15  # the other slow call was the first: for the handle
    assert node.dump()["faults"] == []


def test_a_function_can_be_made_absent_from_the_simulated_library(node: SimNode) -> None:
    """pynvml reports the function as missing in the library. cuGetProcAddress finds no variant of it
    either.
    """
    node.sim("fault", "missing", "--function", "nvmlDeviceGetName")
    assert node.python(NAME) == "error 13\n"
    find = "import ctypes as c; u = c.CDLL('libcuda.so.1'); p, s = c.c_void_p(), c.c_int(); print(u.cuGetProcAddress_v2(b'{}', c.byref(p), 13000, c.c_uint64(0), c.byref(s)), s.value, bool(p.value))"
    assert node.python(find.format("cuMemAllocAsync")) == "0 0 True\n"
    node.sim("fault", "missing", "--function", "cuMemAllocAsync")
    assert node.python(find.format("cuMemAllocAsync")) == "0 1 False\n"
    assert node.python(find.format("cuMemFreeAsync")) == "0 0 True\n"
    tenant = Tenant(node)
    assert tenant.do("cu('cuMemAllocAsync', c.byref(c.c_uint64()), c.c_size_t(8), None)") == "error 500"
    node.sim("fault", "clear")
    assert tenant.do("cu('cuMemAllocAsync', c.byref(c.c_uint64()), c.c_size_t(8), None)") == "ok"


def test_injected_memory_loss_and_a_lost_device_are_reported_to_programs(node: SimNode) -> None:
    tenant = Tenant(node)
    free = int(tenant.say("info").split()[0])
    node.sim("fault", "memory", "--device", "0", "--bytes", str(free - (64 << 20)))
    assert [tenant.say("alloc 64"), tenant.say("alloc 2")] == ["ok", "error 2"]
    node.sim("fault", "gpu-lost", "--device", "0")
    assert tenant.say("sync") == "error 999"
    assert Tenant(node).first == "error 100"


def test_running_programs_see_a_change_of_the_driver_version(node: SimNode) -> None:
    """A program that uses NVML sees the new driver version at once. The files of the node's root have it,
    too.
    """
    code = "import sys, pynvml as n; n.nvmlInit()\nfor line in sys.stdin:\n    print(n.nvmlSystemGetDriverVersion(), flush=True)"
    watching = node.start([sys.executable, "-c", code])

    def seen() -> str:
        assert watching.stdin is not None and watching.stdout is not None
        watching.stdin.write("\n")
        watching.stdin.flush()
        return watching.stdout.readline().strip()

    assert seen() == "580.159.04"
    node.sim("driver", "590.48.01")
    assert seen() == "590.48.01"
    assert "590.48.01" in (node.host_root / "proc/driver/nvidia/version").read_text()
    assert node.dump()["driver_version"] == "590.48.01"


def vgpu_sim(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(build_dir() / "bin/vgpu-sim"), *words]
    env = {"PATH": "/usr/bin:/bin", **more}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_vgpu_sim_run_makes_a_simulated_node_for_one_program(tmp_path: Path) -> None:
    done = vgpu_sim(
        "run",
        "--profile",
        "dgx-h200",
        "--",
        "sh",
        "-c",
        "vgpu-simctl $VGPU_SIM_STATE dump; echo $VGPU_SIM_STATE >&2; exit 7",
    )
    assert done.returncode == 7
    assert [d["name"] for d in json.loads(done.stdout)["devices"]] == ["NVIDIA H200"] * 8
    assert not Path(done.stderr.strip()).exists()
    assert vgpu_sim("run", "--profile", "t4x1", "--", "sh", "-c", "kill -9 $$").returncode == 137
    refused = vgpu_sim("run", "--profile", "h300", "--", "true")
    assert refused.returncode == 1 and "no profile 'h300'" in refused.stderr
    still = tmp_path / "still.toml"
    still.write_text(
        (ROOT / "configs/sim/t4x1.toml").read_text().replace("\ncc = ", "\ntimeslice_us = 0\ncc = ")
    )
    assert "time slice" in vgpu_sim("run", "--profile", str(still), "--", "true").stderr
    still.write_bytes(b'name = "\xff"')
    assert f"{still}: " in vgpu_sim("run", "--profile", str(still), "--", "true").stderr
    assert "cannot run nonsense" in vgpu_sim("run", "--profile", "t4x1", "--", "nonsense").stderr


def test_a_simulated_node_keeps_its_state_and_faults_between_programs(tmp_path: Path) -> None:
    state = str(tmp_path / "node")
    assert vgpu_sim("create", "--profile", "mixed", "--state", state).stdout == f"{state}\n"
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\necho in $VGPU_SIM_STATE\n")
    shell.chmod(0o755)
    assert vgpu_sim("shell", "--state", state, SHELL=str(shell)).stdout == f"in {state}\n"
    assert vgpu_sim("fault", "gpu-lost", "--device", "1", "--state", state).returncode == 0
    lines = vgpu_sim("state", "--state", state).stdout.splitlines()
    assert (
        lines[0].startswith("mixed")
        and len(lines) == 5
        and ["LOST" in line for line in lines[1:3]] == [False, True]
    )
    found = json.loads(vgpu_sim("state", "--json", VGPU_SIM_STATE=state).stdout)
    assert found["devices"][1]["lost"] == 1
    assert "needs --function" in vgpu_sim("fault", "hang", "--state", state).stderr
    assert "no device 9" in vgpu_sim("fault", "xid", "--device", "9", "--state", state).stderr
    assert "no node given" in vgpu_sim("state").stderr
    assert "no state file" in vgpu_sim("state", "--state", str(tmp_path / "none")).stderr


def test_the_simulated_libraries_are_not_on_the_systems_path() -> None:
    """The folder of the simulated libraries is outside of the system's library path. Without a simulated node
    the libraries refuse to work.
    """
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    assert "/sim/lib/" not in listed
    done = vgpu_sim(
        "run",
        "--profile",
        "t4x1",
        "--",
        "env",
        "-u",
        "VGPU_SIM_STATE",
        sys.executable,
        "-c",
        "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))",
    )
    assert done.stdout == "100\n"

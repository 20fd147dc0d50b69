"""The simulated MPS control daemon: its commands, files and special cases, as measured with NVIDIA's
daemon.
"""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.support import eventually, is_alive
from tests.sim.tenant import Tenant
from tests.simnode import SimNode

Make = Callable[..., SimNode]
CONTROL = "nvidia-cuda-mps-control"
RPC_FAILURE, TERMINATED, OUT_OF_MEMORY = "error 806", "error 810", "error 2"


class Mps:
    """One MPS control daemon on a node, with a pipe directory of its own."""

    def __init__(self, node: SimNode, directory: Path) -> None:
        self.node, self.pipe, self.log = node, directory / "p", directory / "l"
        self.env = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    def daemon(self) -> tuple[int, str]:
        done = self.node.run([CONTROL, "-d"], self.env, check=False)
        return done.returncode, done.stderr

    def pid(self) -> int:
        return int((self.pipe / f"{CONTROL}.pid").read_text())

    def say(self, *lines: str) -> tuple[int, str]:
        script = "\n".join(lines)
        done = self.node.run(["sh", "-c", f"printf '%s\\n' '{script}' | {CONTROL}"], self.env, check=False)
        return done.returncode, done.stdout + done.stderr

    def tenant(self, **env: str) -> Tenant:
        return Tenant(self.node, {**self.env, **env})


def says_soon(tenant: Tenant, word: str, answer: str) -> None:
    """Waits for this answer of the tenant. The descriptors of a killed daemon may close later than its main
    thread ends.
    """
    eventually(lambda: tenant.say(word) == answer, answer)


def wait_gone(pid: int) -> None:
    eventually(lambda: not is_alive(pid), f"process {pid} ends")


@pytest.fixture
def mps(sim_node: Make, tmp_path: Path) -> Iterator[Mps]:
    mps = Mps(sim_node(), tmp_path)
    yield mps
    if (mps.pipe / f"{CONTROL}.pid").exists():
        try:
            os.kill(mps.pid(), signal.SIGKILL)
        except ProcessLookupError:
            return


def test_an_mps_daemon_creates_and_removes_its_files(mps: Mps) -> None:
    gone = (1, "Cannot find MPS control daemon process\n")
    assert mps.say("get_server_list") == gone
    assert mps.daemon() == (0, "")
    assert {p.name for p in mps.pipe.iterdir()} == {
        "control",
        "control_lock",
        "control_privileged",
        "log",
        f"{CONTROL}.pid",
    }
    assert {p.name for p in mps.log.iterdir()} == {"control.log", "server.log"}
    assert stat.S_IMODE((mps.pipe / "control").stat().st_mode) == 0o666
    assert mps.daemon() == (1, "An instance of this daemon is already running\n")
    assert mps.say("quit") == (0, "")
    assert {p.name for p in mps.pipe.iterdir()} == {"control", "control_lock", "control_privileged"}
    assert mps.say("get_server_list") == gone


def test_a_killed_mps_daemon_leaves_its_files_and_the_next_daemon_has_no_limits(mps: Mps) -> None:
    mps.daemon()
    mps.say("set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 1024M")
    pid = mps.pid()
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert (mps.pipe / f"{CONTROL}.pid").exists()
    assert mps.say("get_server_list")[0] == 1
    assert mps.daemon() == (0, "")
    assert mps.say("get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0") == (
        0,
        "100.0\n",
    )


def test_the_mps_daemon_ignores_bad_values_silently(mps: Mps) -> None:
    mps.daemon()
    rates = [
        mps.say(f"set_default_active_thread_percentage {v}") for v in ("12.5", "0", "101", "abc", "-3", "0.5")
    ]
    assert rates == [(0, "12.5\n")] * 5 + [(0, "0.5\n")]
    told = {}
    for value in ("4G", "4097M", "1023M", "1.5G", "-1M", "4194304K"):
        assert mps.say(f"set_default_device_pinned_mem_limit 0 {value}") == (0, "")
        told[value] = mps.say("get_default_device_pinned_mem_limit 0")[1].strip()
    assert told == {
        "4G": "4G",
        "4097M": "4G",
        "1023M": "1023M",
        "1.5G": "1M",
        "-1M": "17179869183G",
        "4194304K": "4096G",
    }
    uuid = mps.node.dump()["devices"][0]["uuid"]
    mps.say(f"set_default_device_pinned_mem_limit {uuid} 2048M")
    assert (
        mps.say(f"get_default_device_pinned_mem_limit {uuid}", "get_default_device_pinned_mem_limit 0")[1]
        == "2G\n4096G\n"
    )
    assert mps.say("set_default_client_priority 7") == (0, "Invalid priority value - must be 0 or 1!\n")


@pytest.mark.parametrize("key", ["ordinal", "uuid"])
def test_the_memory_limit_of_an_mps_client_includes_its_context(mps: Mps, key: str) -> None:
    """As measured on an H200 in pieces of 32 MiB, a limit of 1024 MiB leaves 480 MiB, and one of 2048 leaves
    1504.
    """
    device = "0" if key == "ordinal" else mps.node.dump()["devices"][0]["uuid"]
    mps.daemon()
    for limit, left in ((1024, 480), (2048, 1504)):
        mps.say(f"set_default_device_pinned_mem_limit {device} {limit}M")
        tenant = mps.tenant()
        answers = [tenant.say("alloc 32") for _ in range(left // 32 + 1)]
        assert answers == ["ok"] * (left // 32) + [OUT_OF_MEMORY]
        tenant.kill()
        (server,) = mps.say("get_server_list")[1].split()
        # the server that runs keeps its limits, and a new server has the new limits
        mps.say(f"shutdown_server {server}")


def test_an_mps_client_has_no_channels_of_its_own(mps: Mps) -> None:
    mps.daemon()
    mps.tenant()
    (client,) = [p for p in mps.node.dump()["processes"] if p["uses"] and p["uses"][0]["mps"]]
    assert (client["client"], client["uses"][0]["channels"]) == (0, 0)


def test_the_limit_of_an_mps_client_can_lower_that_of_the_daemon_and_not_raise_it(mps: Mps) -> None:
    mps.daemon()
    mps.say("set_default_device_pinned_mem_limit 0 2048M")
    lower = mps.tenant(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")
    assert [lower.say("alloc 480"), lower.say("alloc 32")] == ["ok", OUT_OF_MEMORY]
    higher = mps.tenant(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=8G")
    assert [higher.say("alloc 1504"), higher.say("alloc 32")] == ["ok", OUT_OF_MEMORY]


def test_nvml_and_the_mps_daemon_list_the_mps_clients(mps: Mps) -> None:
    mps.daemon()
    tenant = mps.tenant()
    code = (
        "import json, pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
        "print(json.dumps([[p.pid for p in f(h)] for f in (n.nvmlDeviceGetMPSComputeRunningProcesses, n.nvmlDeviceGetComputeRunningProcesses)]))"
    )
    assert json.loads(mps.node.python(code)) == [[tenant.process.pid], []]
    (server,) = mps.say("get_server_list")[1].split()
    assert Path(f"/proc/{server}/comm").read_text() == "nvidia-cuda-mps\n"
    assert mps.say(f"get_client_list {server}") == (0, f"{tenant.process.pid}\n")
    assert str(tenant.process.pid) in mps.say("ps")[1]
    assert mps.say(f"get_server_status {server}") == (0, "ACTIVE\n")
    mps.say(f"terminate_client {server} {tenant.process.pid}")
    assert tenant.say("sync") == TERMINATED
    assert mps.say(f"get_client_list {server}") == (0, "")


def test_the_death_of_the_mps_daemon_ends_its_clients_and_frees_the_device(mps: Mps) -> None:
    mps.daemon()
    mps.say("set_default_device_pinned_mem_limit 0 1024M")
    tenant = mps.tenant()
    assert tenant.say("sync") == "ok"
    pid = mps.pid()
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    says_soon(tenant, "sync", RPC_FAILURE)
    assert tenant.say("alloc 1") == RPC_FAILURE
    unlimited = mps.tenant()  # a program without MPS has no limit and gets no error
    assert unlimited.say("alloc 4096") == "ok"


def test_several_mps_clients_run_on_a_device_in_compute_mode_exclusive_process(mps: Mps) -> None:
    mps.node.python(
        "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetComputeMode(n.nvmlDeviceGetHandleByIndex(0), 3)"
    )
    mps.daemon()
    assert [mps.tenant().first[:5] for _ in range(2)] == ["ready", "ready"]
    assert Tenant(mps.node).first == "error 46"


def test_the_thread_percentage_of_mps_scales_the_number_of_multiprocessors(mps: Mps) -> None:
    mps.daemon()
    mps.say("set_default_active_thread_percentage 50")
    code = (
        "import ctypes as c; u = c.CDLL('libcuda.so.1'); u.cuInit(0); v = c.c_int();"
        "u.cuDeviceGetAttribute(c.byref(v), 16, 0); print(v.value)"
    )
    for percent, sms in ((None, "66"), ("25", "34"), ("75", "66")):
        extra = {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent}
        assert mps.node.python(code, {**mps.env, **extra}).strip() == sms


@pytest.mark.parametrize(("percents", "got"), [((25, 50), (0.25, 0.5)), ((100, 50), (2 / 3, 1 / 3))])
def test_concurrent_mps_clients_are_held_to_their_thread_percentages(
    mps: Mps, percents: tuple[int, int], got: tuple[float, float]
) -> None:
    mps.daemon()
    tenants = [mps.tenant(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(percent)) for percent in percents]
    assert [tenant.say("launch 1000 1000000") for tenant in tenants] == ["ok", "ok"]
    marks = []
    for _ in range(2):
        state = mps.node.dump()
        uses = {p["pid"]: p["uses"][0]["done_ns"] for p in state["processes"] if p["uses"]}
        marks.append((state["devices"][0]["busy_ns"], [uses[t.process.pid] for t in tenants]))
    (before, first), (after, second) = marks
    shares = [(b - a) / (after - before) for a, b in zip(first, second, strict=True)]
    assert shares == pytest.approx(got, rel=1e-3)


def test_mps_clients_name_their_static_partition(sim_node: Make, tmp_path: Path) -> None:
    mps = Mps(sim_node(driver="595"), tmp_path)
    uuid = str(mps.node.dump()["devices"][0]["uuid"])
    assert mps.node.run([CONTROL, "-S", "-d"], mps.env, check=False).returncode == 0
    try:
        _, said = mps.say(f"sm_partition add {uuid} 16", f"sm_partition add {uuid} 1", "lspart")
        made, refused, *table = said.splitlines()
        assert refused.startswith("Failed to fulfill the requested SM partition of 1 chunks")
        assert table[2].split()[1:] == ["-", "0", "16", "4", "128", "-"]
        name = made.split()[1]
        assert mps.tenant().first == mps.tenant(CUDA_MPS_SM_PARTITION=f"{uuid}/none").first == "error 915"
        inside = mps.tenant(CUDA_MPS_SM_PARTITION=name)
        assert inside.first[:5] == "ready"
        identity = name.split("/")[1]
        assert "in use" in mps.say(f"sm_partition rm {uuid} {identity}")[1]
        assert mps.say("lspart")[1].split()[-1] == "Yes"
        inside.kill()
        eventually(lambda: mps.say(f"sm_partition rm {uuid} {identity}")[1] == "", "the partition is free")
    finally:
        os.kill(mps.pid(), signal.SIGKILL)


def test_driver_branches_before_590_have_no_static_partitions(mps: Mps) -> None:
    assert mps.node.run([CONTROL, "-S", "-d"], mps.env, check=False).returncode == 1
    mps.daemon()
    assert "not enabled" in mps.say("sm_partition add GPU-1 1")[1]
    assert mps.say("lspart") == (0, "")


def test_the_mps_daemon_fails_without_a_simulated_node_and_with_a_long_path(mps: Mps, tmp_path: Path) -> None:
    silent = mps.node.run([CONTROL, "-d"], {**mps.env, "VGPU_SIM_STATE": "/nonexistent"}, check=False)
    assert (silent.returncode, silent.stdout, silent.stderr) == (244, "", "")
    long_path = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / ("x" * 120))}
    assert mps.node.run([CONTROL, "-d"], long_path, check=False).returncode == 1


SEEN = """
import ctypes as c, json, uuid
u = c.CDLL("libcuda.so.1")
if code := u.cuInit(0):
    print(json.dumps(code))
else:
    n = c.c_int(); u.cuDeviceGetCount(c.byref(n)); out = []
    for i in range(n.value):
        b = (c.c_char * 16)(); u.cuDeviceGetUuid_v2(b, i); out.append("GPU-" + str(uuid.UUID(bytes=bytes(b))))
    print(json.dumps(out))
"""


def test_an_mps_client_sees_only_the_devices_of_its_daemon(sim_node: Make, tmp_path: Path) -> None:
    """The daemon's list of devices restricts and renumbers them. The numbers in a client's list are those of
    the daemon's list.
    """
    node = sim_node()
    uuids = [d["uuid"] for d in node.dump()["devices"]]
    mps = Mps(node, tmp_path)
    done = node.run([CONTROL, "-d"], {**mps.env, "CUDA_VISIBLE_DEVICES": f"{uuids[5]},2"}, check=False)
    assert done.returncode == 0
    try:
        # ordinal 1 of the daemon is device 2 of the node
        mps.say("set_default_device_pinned_mem_limit 1 1024M")
        for own, seen in (
            (None, [uuids[5], uuids[2]]),
            ("1", [uuids[2]]),
            ("1,0", [uuids[2], uuids[5]]),
            (uuids[2], [uuids[2]]),
            (f"{uuids[2]},{uuids[0]}", [uuids[2]]),
            (uuids[0], 100),
            ("2", 100),
        ):
            env = mps.env if own is None else {**mps.env, "CUDA_VISIBLE_DEVICES": own}
            assert json.loads(node.python(SEEN, env)) == seen
        tenant = mps.tenant(CUDA_VISIBLE_DEVICES="1")
        assert [tenant.say("alloc 480"), tenant.say("alloc 32")] == ["ok", OUT_OF_MEMORY]
        assert node.dump()["devices"][2]["memory_used"] > 0
    finally:
        mps.say("quit")

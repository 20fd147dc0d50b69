"""The driver branch is a property of a simulated node. It decides which functions NVML has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cgroups import cgroup  # noqa: F401
from tests.conditions import needs
from tests.sim.tenant import Tenant
from tests.simnode import SimNode, simulator

Make = Callable[..., SimNode]
MIB = 1 << 20

HEAD = """
import ctypes, json, pynvml as n
def ask(function, *args):
    try:
        return function(*args)
    except n.NVMLError as e:
        return f"error {e.value}"
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def field(number):
    value = n.nvmlDeviceGetFieldValues(h, [number])[0]
    return [value.nvmlReturn, value.value.uiVal]
def limit(path, hard, soft=0):
    return ask(n.nvmlDeviceSetMemoryLimits_v1, h, n.c_nvmlSetMemoryLimits_v1_t(path.encode(), soft, hard))
def limits(path):
    out = n.c_nvmlGetMemoryLimits_v1_t(path.encode())
    return ask(n.nvmlDeviceGetMemoryLimits_v1, h, out) or [out.softLimit, out.hardLimit, out.currentUsed]
"""


def ask(node: SimNode, body: str) -> object:
    return json.loads(node.python(HEAD + body + "\nprint(json.dumps(out))"))


@pytest.mark.parametrize("branch", ["535", "550", "580", "595", "615"])
def test_a_simulated_node_has_the_driver_branch_that_it_is_made_with(sim_node: Make, branch: str) -> None:
    node = sim_node(driver=branch)
    version, nvml, cuda = simulator("profile").DRIVERS[branch]
    out = ask(
        node,
        "out = [ask(getattr(n, f'nvmlSystemGet{name}Version')) for name in ('Driver', 'NVML', 'CudaDriver')]",
    )
    assert out == [version, nvml, cuda]


def test_a_simulated_node_refuses_an_unknown_driver_branch(sim_node: Make) -> None:
    with pytest.raises(simulator("profile").ProfileError, match="no driver '470'; there are: 535, 550"):
        sim_node(driver="470")


@pytest.mark.parametrize(
    ("branch", "recovery", "banks", "limits"),
    [
        ("535", 3, 3, "error 13"),
        ("550", 3, 3, "error 13"),
        ("580", 0, 3, "error 13"),
        ("595", 0, 3, "error 13"),
        ("615", 0, 0, "error 2"),
    ],
)
def test_a_driver_branch_lacks_functions_that_later_branches_added(
    sim_node: Make, branch: str, recovery: int, banks: int, limits: str
) -> None:
    """The results are 13 FUNCTION_NOT_FOUND, 3 NOT_SUPPORTED, or 2 INVALID_ARGUMENT (the path is in no cgroup
    tree).
    """
    out = ask(sim_node(driver=branch), "out = [field(230)[0], field(307)[0], limits('/nowhere')]")
    assert out == [recovery, banks, limits]


def test_a_card_reports_which_repair_it_needs_until_its_reset(sim_node: Make) -> None:
    node = sim_node(driver="615")
    node.sim("fault", "recovery", "--device", "0", "--code", "1")
    node.sim("fault", "rows-pending", "--device", "0", "--code", "2")
    node.sim("fault", "banks-pending", "--device", "0", "--code", "1")
    body = "out = [field(230), field(307), n.nvmlDeviceGetRemappedRows(h)]"
    assert ask(node, body) == [[0, 1], [0, 1], [0, 0, 2, 0]]
    node.sim("reset", "0")
    assert ask(node, body) == [[0, 0], [0, 0], [0, 2, 0, 0]]


@needs("cgroups")
def test_the_driver_refuses_memory_beyond_the_limit_of_a_cgroup(sim_node: Make, cgroup: Path) -> None:  # noqa: F811
    """The limit counts a process in the control group and one in a group below it. A process outside is not
    limited.
    """
    node, inner = sim_node(driver="615"), cgroup / "inner"
    inner.mkdir()
    first, second, outside = Tenant(node), Tenant(node), Tenant(node)
    (cgroup / "cgroup.procs").write_text(str(first.process.pid))
    (inner / "cgroup.procs").write_text(str(second.process.pid))
    assert ask(node, f"out = limit({str(cgroup)!r}, {2048 * MIB})") is None
    answers = [first.say("alloc 600"), second.say("alloc 600"), outside.say("alloc 2000")]
    assert answers == ["ok", "error 2", "ok"]
    assert ask(node, f"out = limits({str(cgroup)!r})") == [0, 2048 * MIB, (600 + 2 * 526) * MIB]
    assert ask(node, f"out = [limit({str(cgroup)!r}, n.NVML_DEVICE_MEMORY_LIMIT_MAX)]") == [None]
    assert second.say("alloc 600") == "ok"


@needs("cgroups")
def test_a_device_memory_limit_ends_with_its_cgroup(sim_node: Make, cgroup: Path) -> None:  # noqa: F811
    node, inner = sim_node(driver="615"), cgroup / "inner"
    for _ in range(2):
        inner.mkdir()
        assert ask(node, f"out = limits({str(inner)!r})") == [0, 2**64 - 1, 0]
        assert ask(node, f"out = limit({str(inner)!r}, {MIB})") is None
        assert [wall["hard"] for wall in node.dump()["walls"]] == [MIB]
        inner.rmdir()
        assert node.dump()["walls"] == []


@needs("cgroups")
def test_a_card_in_mig_mode_has_no_limits_for_cgroups(sim_node: Make, cgroup: Path) -> None:  # noqa: F811
    body = f"n.nvmlDeviceSetMigMode(h, 1); out = limits({str(cgroup)!r})"
    assert ask(sim_node(driver="615"), body) == "error 3"


def test_a_simulated_nodes_root_can_be_completed_for_tools_that_read_a_driver_root(sim_node: Make) -> None:
    """nvidia-ctk finds a driver by the version in the names of its libraries."""
    node = sim_node("mixed")
    root = Path(node.sim("root").strip())
    assert root == node.host_root
    version = node.dump()["driver_version"]
    (folder,) = root.glob("usr/lib/*-linux-gnu")
    for name in ("libcuda.so", "libnvidia-ml.so"):
        assert (folder / name).resolve() == folder / f"{name}.{version}"
        assert not (folder / f"{name}.{version}").is_symlink()
    cards = sorted(root.glob("sys/bus/pci/devices/*"))
    assert len(cards) == len(node.dump()["devices"])
    for card in cards:
        found = {name: (card / name).read_text().strip() for name in ("vendor", "subsystem_vendor", "class")}
        assert found == {"vendor": "0x10de", "subsystem_vendor": "0x10de", "class": "0x030200"}
        assert [len(line.split()) for line in (card / "resource").read_text().splitlines()] == [3]
    assert (root / "proc/modules").read_text().split()[0] == "nvidia"
    ask(node, "n.nvmlDeviceSetMigMode(h, 1); n.nvmlDeviceCreateGpuInstance(h, 0); out = 0")
    node.sim("root")  # the root is completed again, as after an upgrade of the driver
    if os.geteuid() == 0:
        (access,) = root.glob("proc/driver/nvidia/capabilities/gpu0/mig/gi*/access")
        minor = int(access.read_text().split()[1])
        made = {one.name for one in (root / "dev/nvidia-caps").iterdir()}
        assert made == {f"nvidia-cap{number}" for number in (1, 2, minor)}
        numbers = {one.name: one.stat().st_rdev for one in (root / "dev").iterdir()}
        assert numbers["nvidiactl"] == os.makedev(195, 255)
        assert {f"nvidia{one['index']}" for one in node.dump()["devices"]} < numbers.keys()

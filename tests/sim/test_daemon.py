"""A whole vgpud on the simulated node. It reports that the node is simulated, and survives the driver faults
that `vgpu-sim` injects.
"""

from __future__ import annotations

import subprocess

from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import make_node, node
from tests.e2e.support import eventually

__all__ = ["make_node", "node"]


def sim(node: DemoNode, *words: str) -> None:
    subprocess.run([str(BUILD / "bin/vgpu-sim"), *words], env=node.environment, check=True, timeout=300)


def test_vgpud_reports_that_its_node_is_simulated(node: DemoNode) -> None:
    node.start()
    assert node.ctl("status").stdout.splitlines()[0] == "SIMULATED: no real GPU is behind this daemon"
    assert node.ctl_json("status")["simulated"] is True
    assert "node_is_simulated" in node.log.read_text()


def test_vgpud_notices_a_changed_driver_version(node: DemoNode) -> None:
    node.start()
    sim(node, "driver", "590.48.01")
    held = node.ctl("alloc", "--isolation", "quota", "--memory", "1GiB").stdout.strip()
    assert held
    eventually(lambda: "590.48.01" in node.ctl("status").stdout, "the new driver is told")
    sim(node, "fault", "slow", "--function", "nvmlDevice*", "--microseconds", "2000", "--count", "200")
    sim(node, "fault", "fail", "--function", "nvmlDeviceGetTemperature*", "--code", "999", "--count", "5")
    assert node.ctl("release", held).returncode == 0
    sim(node, "fault", "clear")
    assert node.ctl("status").returncode == 0

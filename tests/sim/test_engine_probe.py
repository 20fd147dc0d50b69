"""vgpu-engine-probe finds whether a device's tenants can be preempted from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import eventually
from tests.sim.test_mps import Mps
from tests.simnode import SimNode

Make = Callable[..., SimNode]


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node()


def probe(node: SimNode, env: dict[str, str] | None = None) -> dict[str, Any]:
    program = str(node.build / "bin" / "vgpu-engine-probe")
    answer: dict[str, Any] = json.loads(node.run([program, node.dump()["devices"][1]["uuid"]], env).stdout)
    return answer


def test_the_probe_selects_the_engine_cut_if_kernels_can_be_preempted(node: SimNode) -> None:
    answer = probe(node)
    assert answer["engine"] == "cut"
    assert answer["off_us"] >= 449 and answer["on_us"] >= 275
    assert answer["context_mib"] == 526
    assert node.dump()["processes"] == []


def test_the_probe_lists_each_channel_once_in_a_call(node: SimNode) -> None:
    """A channel that a call lists twice is disabled twice."""
    device = node.dump()["devices"][1]["uuid"]
    node.sim("fault", "hang", "--function", "FIFO_DISABLE_CHANNELS.disabled")
    probing = node.start([str(node.build / "bin" / "vgpu-engine-probe"), device])

    def uses() -> list[tuple[int, int]]:
        used = [use for one in node.dump()["processes"] for use in one["uses"]]
        return [(use["channels_off"], use["channels_repeated"]) for use in used if use["channels_off"]]

    eventually(lambda: uses() != [], "its channels are disabled")
    assert uses() == [(8, 0)]
    node.sim("fault", "clear")
    assert json.loads(probing.communicate()[0])["engine"] == "cut"


def test_the_probe_works_with_a_kernel_that_was_measured_too_long(node: SimNode) -> None:
    """On a machine with busy processors a kernel of 30 ms may be measured as 200 ms. The probe then disables
    the channels in the middle of the kernel.
    """
    node.sim("fault", "slow", "--function", "cuStreamSynchronize", "--microseconds", "200000")
    assert probe(node)["engine"] == "cut"


def test_the_probe_selects_the_gate_if_the_driver_refuses_preemption(node: SimNode) -> None:
    node.sim("fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86")
    answer = probe(node)
    assert answer["engine"] == "gate"
    assert "refuses to stop channels: status 0x56" in answer["why"]


def test_the_probe_detects_a_driver_that_only_pretends_to_preempt(node: SimNode) -> None:
    node.sim("fault", "fail", "--function", "FIFO_DISABLE_CHANNELS.lies", "--code", "1")
    answer = probe(node)
    assert answer["engine"] == "gate"
    assert "the kernel goes on" in answer["why"]


def test_the_probe_finds_no_channels_of_an_mps_client(node: SimNode, tmp_path: Path) -> None:
    mps = Mps(node, tmp_path)
    mps.daemon()
    answer = probe(node, mps.env)
    mps.say("quit -t 1")
    assert answer == {
        "engine": "gate",
        "why": "the process has no channels of its own",
        "off_us": 0,
        "on_us": 0,
        "context_mib": 0,
    }


MIG = """
import pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlDeviceSetMigMode(card, 1)
for number in range(2):
    instance = n.nvmlDeviceCreateGpuInstance(card, n.nvmlDeviceGetGpuInstanceProfileInfo(card, 2).id)
    profile = n.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 2, 0)
    n.nvmlGpuInstanceCreateComputeInstance(instance, profile.id)
    print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(card, number)))
"""


def test_a_mig_instance_of_the_simulated_node_can_be_preempted(node: SimNode) -> None:
    """On a real device this was never tried, so vgpud uses engine `gate` for MIG instances
    (docs/compute.md).
    """
    program = str(node.build / "bin" / "vgpu-engine-probe")
    for uuid in node.python(MIG).split():
        assert json.loads(node.run([program, uuid]).stdout)["engine"] == "cut"

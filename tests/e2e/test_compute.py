"""Compute shares through the daemon: asked for, summed, resized while a program runs, counted."""

import itertools
import time

import pytest

from tests.arbiter.conftest import counters
from tests.demo.node import BUILD, DemoNode
from tests.e2e.support import eventually, states

KERNEL_US = "1000"
ASKED = ["--isolation", "quota", "--device", "0", "--memory", "2GiB"]
SPIN = ["env", f"VGPU_SIM_KERNEL_US={KERNEL_US}", str(BUILD / "bin" / "vgpu-spin"), "--kernel-us", KERNEL_US]


@pytest.fixture
def started(node: DemoNode) -> DemoNode:
    node.start()
    return node


def test_a_share_is_held_resized_and_counted(started: DemoNode) -> None:
    spinning = ["--seconds", "5", "--report-ms", "200"]
    tenant = started.tenant([*ASKED, "--cores", "15"], [*SPIN, *spinning])
    eventually(lambda: states(started), "it is allocated")
    (allocation,) = states(started)
    lease = started.run_dir / "leases" / allocation
    eventually(lambda: counters(lease)["used_ns"] > 150_000_000, "a second at its share")
    started.ctl("resize", allocation, "--cores", "90")
    line = tenant.line()
    assert line["libvgpu"] is True
    done = [b[1] - a[1] for a, b in itertools.pairwise(line["windows"])]
    assert sum(done[-4:]) > 1.8 * sum(done[:4]), done
    tenant.end()


def test_shares_of_a_device_do_not_pass_the_whole_of_it(started: DemoNode) -> None:
    first = started.ctl("alloc", *ASKED, "--cores", "60").stdout.strip()
    second = started.ctl("alloc", *ASKED, "--cores", "30").stdout.strip()
    memory_only = started.ctl("alloc", *ASKED).stdout.strip()
    refused = started.ctl("alloc", *ASKED, "--cores", "20", check=False)
    assert refused.returncode != 0
    assert "a share of 20% is more than the 10% not yet given" in refused.stderr
    grown = started.ctl("resize", second, "--cores", "45", check=False)
    assert grown.returncode != 0
    started.ctl("resize", first, "--cores", "50")
    started.ctl("resize", second, "--cores", "45")
    time.sleep(0.1)
    for allocation in (first, second, memory_only):
        started.ctl("release", allocation)

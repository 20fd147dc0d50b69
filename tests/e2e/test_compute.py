"""Compute shares through the daemon: requested, summed, resized while a program runs, and metered."""

from pathlib import Path

import pytest

from tests.arbiter.accounts import is_held_to
from tests.arbiter.conftest import LONG, counters
from tests.demo.node import BUILD, POLICY, DemoNode
from tests.e2e.support import PROBE, eventually, states
from tests.e2e.test_turns import simulated
from vgpud.lease import DeviceLimits, SharePolicy, read_limits

KERNEL_US = "1000"
# allows a test user without privileges to ask for priority
PRIORITY = '[[quota]]\nmax_priority = "above-normal"\n'
ASKED = ["--isolation", "quota", "--device", "0", "--memory", "2GiB"]
SPIN = ["env", f"VGPU_SIM_KERNEL_US={KERNEL_US}", str(BUILD / "bin" / "vgpu-spin"), "--kernel-us", KERNEL_US]
SPIN += ["--seconds", str(LONG)]


class OneSlice:
    """A condition that is true once the device has done 200 ms of work in one time slice. At a hard share of
    25 % a time slice is shorter.
    """

    def __init__(self, node: DemoNode, lease: Path) -> None:
        self._node, self._lease, self._turns, self._first = node, lease, -1, 0

    def __call__(self) -> bool:
        turns = counters(self._lease)["turns"]
        done: int = sum(use["done_ns"] for one in simulated(self._node)["processes"] for use in one["uses"])
        if turns != self._turns or turns != counters(self._lease)["turns"]:
            self._turns, self._first = turns, done
        return done > self._first + 200_000_000


@pytest.fixture
def started(node: DemoNode) -> DemoNode:
    config(node).write_text(POLICY + PRIORITY)
    node.start()
    return node


def test_a_compute_share_is_enforced_resized_and_metered(started: DemoNode) -> None:
    tenant = started.tenant([*ASKED, "--cores", "15"], SPIN)
    (allocation,) = active(started, 1)
    lease = started.run_dir / "leases" / allocation
    is_held_to(lease, 15)
    started.ctl("resize", allocation, "--cores", "90")
    is_held_to(lease, 90)
    tenant.process.kill()
    tenant.end()


def test_compute_shares_of_a_device_do_not_exceed_100_percent(started: DemoNode) -> None:
    first = started.ctl("alloc", *ASKED, "--cores", "60").stdout.strip()
    second = started.ctl("alloc", *ASKED, "--cores", "30").stdout.strip()
    memory_only = started.ctl("alloc", *ASKED).stdout.strip()
    refused = started.ctl("alloc", *ASKED, "--cores", "20", check=False)
    assert refused.returncode != 0
    assert "a share of 20% is more than the 10% that is free" in refused.stderr
    grown = started.ctl("resize", second, "--cores", "45", check=False)
    assert grown.returncode != 0
    started.ctl("resize", first, "--cores", "50")
    started.ctl("resize", second, "--cores", "45")
    for allocation in (first, second, memory_only):
        started.ctl("release", allocation)


def test_an_idle_tenants_share_is_lent_under_work_conserving(started: DemoNode) -> None:
    """The share is hard at first. The reload of the policy makes it work-conserving for the running
    tenant.
    """
    idle = started.tenant([*ASKED, "--cores", "75"], [PROBE, "hold", "64MiB", "--then-wait-on-stdin"])
    idle.line()
    (idle_id,) = active(started, 1)
    ask = [*ASKED, "--cores", "25", "--priority", "above-normal"]
    busy = started.tenant(ask, SPIN)
    (allocation,) = active(started, 2) - {idle_id}
    lease = started.run_dir / "leases" / allocation
    is_held_to(lease, 25)
    assert rules(lease) == (SharePolicy.HARD, 1)
    reload(started, 'share_policy = "work-conserving"\n')
    assert rules(lease) == (SharePolicy.WORK_CONSERVING, 1)
    eventually(OneSlice(started, lease), "one slice is longer than many at a hard share")
    busy.process.kill()
    busy.end()
    idle.end()


def test_a_tenants_share_policy_and_priority_survive_a_resize_and_a_restart(started: DemoNode) -> None:
    reload(started, 'share_policy = "work-conserving"\n')
    held = started.ctl("alloc", *ASKED, "--cores", "20", "--priority", "below-normal").stdout.strip()
    lease = started.run_dir / "leases" / held
    started.ctl("resize", held, "--cores", "30")
    assert limits(lease).share_hundredths == 3000
    assert rules(lease) == (SharePolicy.WORK_CONSERVING, -1)
    started.kill()
    config(started).write_text(POLICY)
    started.start()
    assert rules(lease) == (SharePolicy.HARD, -1), "the policy changed while no daemon ran"
    started.ctl("release", held)


def active(node: DemoNode, count: int) -> set[str]:
    """Waits for `count` active allocations and returns their ids. An allocation in another state may have no
    lease yet.
    """
    eventually(lambda: list(states(node).values()) == ["active"] * count, f"{count} are active")
    return set(states(node))


def limits(lease: Path) -> DeviceLimits:
    (device,) = read_limits(lease).devices
    return device


def rules(lease: Path) -> tuple[SharePolicy, int]:
    device = limits(lease)
    return device.share_policy, device.priority


def config(node: DemoNode) -> Path:
    return Path(node.environment["VGPUD_CONFIG"])


def reload(node: DemoNode, preload: str) -> None:
    config(node).write_text(f"{POLICY}[device.preload]\n{preload}{PRIORITY}")
    told = node.ctl("policy", "reload")
    assert "preload.share_policy: " in told.stdout

"""The engine that takes tenants off the card: shares, and what becomes of a tenant that is off."""

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.arbiter.conftest import KERNEL_US, LONG, Card, answer, counters, span
from tests.e2e.support import eventually
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
GROUP = struct.Struct("<16s4I8I")
DONE = 5


def work(line: dict[str, Any]) -> float:
    """Percent of the card's time, by the kernels that the process got through."""
    assert line["libvgpu"] is True
    return float(line["per_second"]) * KERNEL_US / 1e4


def table(lease: Path, slot: int = 0) -> tuple[int, list[tuple[int, ...]]]:
    """The devices that the process of a slot is off, as bits, and its channel groups."""
    raw = (lease / layout.USAGE_FILE).read_bytes()[layout.CHANNELS_AT + slot * layout.CHANNELS_SIZE :]
    _, count, _, off = struct.unpack_from("<QIII", raw)
    groups = [GROUP.unpack_from(raw, layout.CHANNELS_GROUPS + i * GROUP.size)[1:] for i in range(count)]
    return off, groups


def test_the_channels_of_a_context_are_listed(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 50)
    cut_card.spin(lease, LONG)
    eventually(lambda: len(table(lease)[1]) == 1, "one group that computes")
    ((_, client, subdevice, count, *channels),) = table(lease)[1]
    assert client != 0 and subdevice != 0
    assert count == 8 and len(set(channels)) == 8


def test_a_lone_hard_tenant_stays_under_its_share(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 25)
    assert work(answer(cut_card.spin(lease, 2.0))) < 45
    assert counters(lease)["turns"] > 5


@pytest.mark.parametrize("mode", ["graph", "callbacks", "streams", "green"])
def test_every_way_to_launch_is_under_the_share(cut_card: Card, mode: str) -> None:
    lease = cut_card.lease("a", HARD, 25)
    assert work(answer(cut_card.spin(lease, 2.0, "--mode", mode))) < 45


def test_two_tenants_divide_the_card(cut_card: Card) -> None:
    small, large = cut_card.lease("a", CONSERVING, 25), cut_card.lease("b", CONSERVING, 75)
    for lease in (small, large):
        cut_card.spin(lease, LONG)
    used = span(small, large, seconds=1.5).used
    assert 0.15 < used[0] / sum(used) < 0.36, used


def test_processes_of_one_tenant_have_one_share(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 30)
    processes = [cut_card.spin(lease, 2.0) for _ in range(3)]
    done = [work(answer(process)) for process in processes]
    assert all(part > 0 for part in done) and sum(done) < 50


def test_a_stopped_tenant_is_preempted(cut_card: Card) -> None:
    stopped, other = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    process = cut_card.spin(stopped, LONG)
    cut_card.spin(other, LONG)
    span(stopped, other, turns=2, seconds=0.1)
    process.send_signal(signal.SIGSTOP)
    before = counters(stopped)["bypasses"]
    span(other, turns=5, seconds=0.5)
    assert counters(stopped)["bypasses"] == before == 0


def test_a_tenant_killed_while_preempted_leaves_no_channels(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: table(lease)[0] == 1, "it is off")
    process.kill()
    process.wait()
    free = cut_card.lease("b", SharePolicy.NONE, 100)
    assert work(answer(cut_card.spin(free, 1.0))) > 50


def test_a_preempted_tenant_without_an_arbiter_enables_its_channels(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: table(lease)[0] == 1, "it is off")
    cut_card.kill_arbiter()
    eventually(lambda: table(lease)[0] == 0, "it is back")
    assert process.poll() is None


def test_a_restarted_arbiter_continues_the_turns(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 25)
    process = cut_card.spin(lease, 4.0)
    eventually(lambda: counters(lease)["turns"] > 5, "it has turns")
    cut_card.kill_arbiter()
    time.sleep(0.1)  # less than a tenant waits before it puts itself back
    cut_card.start_arbiter()
    assert 0 < work(answer(process)) < 40


def test_an_idle_tenant_costs_the_others_nothing(cut_card: Card) -> None:
    idle, other = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(idle, LONG, "--every-us", "60000000")
    eventually(lambda: counters(idle)["turns"] > 0, "it was there")
    process = cut_card.spin(other, 2.0)
    assert work(answer(process)) > 60


def test_two_tenants_that_leave_gaps_are_not_taken_off(cut_card: Card) -> None:
    leases = [cut_card.lease(name, CONSERVING, 50) for name in "ab"]
    processes = [cut_card.spin(lease, LONG, "--every-us", "5000") for lease in leases]
    eventually(lambda: stays_on(*leases), "both stay on the card", 60)
    assert all(process.poll() is None for process in processes)


def stays_on(*leases: Path) -> bool:
    """Both compute, and neither is off at any of many looks."""
    before = [counters(lease)["used_ns"] for lease in leases]
    off = 0
    for _ in range(200):
        off |= max(table(lease)[0] for lease in leases)
        time.sleep(0.002)
    return off == 0 and all(counters(lease)["used_ns"] > b for lease, b in zip(leases, before, strict=True))


def test_a_tenant_with_gaps_rides_in_the_slices_of_one_without(cut_card: Card) -> None:
    gaps, full = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(full, LONG)
    line = answer(cut_card.spin(gaps, 4.0, "--every-us", "5000"))
    slice_us = 50_000
    assert line["p50_us"] < slice_us / 2


def test_each_request_of_a_priority_tenant_interrupts(cut_card: Card) -> None:
    """The tenant says at the end of each that it is idle; were that late, requests would share slices."""
    first = cut_card.lease("a", CONSERVING, 40, priority=1)
    cut_card.spin(cut_card.lease("b", CONSERVING, 60), LONG)
    answer(cut_card.spin(first, 3.0, "--every-us", "10000"))
    assert counters(first)["turns"] > 100


@pytest.mark.parametrize("word", ["client", "subdevice", "channel", "file"])
def test_listed_channels_of_another_tenant_are_not_disabled(cut_card: Card, word: str) -> None:
    """A tenant that lists another's channels as its own: the driver refuses the call, the other goes on."""
    liar, other = cut_card.lease("a", HARD, 10), cut_card.lease("b", SharePolicy.NONE, 100, first_device=1)
    victim = cut_card.spin(other, LONG)
    eventually(lambda: len(table(other)[1]) == 1, "the other's channels are listed")
    group = list(table(other)[1][0])
    if word != "client":
        at = {"file": 0, "subdevice": 2, "channel": 4}[word]
        group[at] ^= 0x55
    process = cut_card.spin(liar, LONG)
    eventually(lambda: len(table(liar)[1]) == 1, "its own are, too")
    uuid = (liar / layout.USAGE_FILE).read_bytes()[layout.CHANNELS_AT + layout.CHANNELS_GROUPS :][:16]
    with (liar / layout.USAGE_FILE).open("r+b") as page:
        os.pwrite(page.fileno(), GROUP.pack(uuid, *group), layout.CHANNELS_AT + layout.CHANNELS_GROUPS)
    turns = counters(liar)["turns"]
    eventually(lambda: counters(liar)["turns"] > turns + 5, "calls were made with them")
    (used,) = [p["uses"] for p in cut_card.sim.dump()["processes"] if p["pid"] == victim.pid]
    assert [one["channels_off"] for one in used] == [0]
    assert process.poll() is None and victim.poll() is None

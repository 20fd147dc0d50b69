"""Shares on a simulated card, whatever the machine lets the tenants do with them.

Who has how much is read from the arbiter's accounts, where a tenant that the machine keeps from running pays
for its turn all the same; what got done has upper bounds only. Exactness is measured on a real card
(tests/gpu/compute_h200.py) and on the model (test_model.py).
"""

import itertools
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.arbiter.conftest import LONG, Card, answer, counters, had, holds_alone, percent, span, work
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy, write_lease

HARD, CONSERVING, NONE = SharePolicy.HARD, SharePolicy.WORK_CONSERVING, SharePolicy.NONE
WANT, DONE = 4, 5


def windows(process: Any) -> list[int]:
    """Kernels done in each."""
    return [b[1] - a[1] for a, b in itertools.pairwise(answer(process)["windows"])]


def test_a_lone_hard_tenant_stays_under_its_share(card: Card) -> None:
    lease = card.lease("a", HARD, 25)
    holds_alone(lease, answer(card.spin(lease, 2.0)))


def test_two_hard_tenants_divide_the_card(card: Card) -> None:
    small, large = card.lease("a", HARD, 25), card.lease("b", HARD, 75)
    for lease in (small, large):
        card.spin(lease, LONG)
    got = span(small, large, seconds=1.5)
    assert got.percents[0] < 34 and got.percents[1] < 84, got
    assert 15 < got.parts[0] < 36, got


def test_processes_of_one_tenant_have_one_share(card: Card) -> None:
    lease = card.lease("a", HARD, 30)
    processes = [card.spin(lease, 2.0, "--mode", "streams") for _ in range(3)]
    assert 0 < sum(percent(p) for p in processes) < 36


def test_a_kernel_longer_than_a_turn_is_paid_for(card: Card) -> None:
    """Each turn ends late; the next comes so much later."""
    lease = card.lease("a", HARD, 10)
    card.kernel_us = 40_000
    card.spin(lease, LONG)
    got = span(lease, turns=4, seconds=1.5)
    assert got.percents[0] < 19, got


def test_green_contexts_have_the_share_of_their_tenant(card: Card) -> None:
    lease = card.lease("a", HARD, 25)
    holds_alone(lease, answer(card.spin(lease, 1.5, "--mode", "green")))


def test_idle_time_is_lent_and_comes_back(card: Card) -> None:
    lent, owner = card.lease("a", CONSERVING, 20), card.lease("b", CONSERVING, 80)
    idle = card.spin(owner, 2.0, "--every-us", "400000")
    answer(card.spin(lent, 1.5))
    assert counters(lent)["used_ns"] > 750_000_000  # had it, whether or not this machine let it launch enough
    answer(idle)
    for lease in (lent, owner):
        card.spin(lease, LONG)
    got = span(lent, owner)
    assert got.parts[0] < 36, got


def test_without_limits_nobody_is_scheduled(card: Card) -> None:
    leases = [card.lease(name, NONE, 100) for name in "ab"]
    first, second = [card.spin(lease, 1.0) for lease in leases]
    assert min(percent(first), percent(second)) > 0
    counted = [counters(lease) for lease in leases]
    assert all(one["turns"] <= 3 and one["waited_ns"] < 1e8 for one in counted), counted


def test_a_change_of_share_takes_effect_in_a_running_tenant(card: Card) -> None:
    lease = card.lease("a", HARD, 90)
    card.spin(lease, LONG)
    before = span(lease, turns=5)
    card.change(lease, HARD, 10)
    after = span(lease, turns=5)
    assert after.percents[0] < 0.4 * before.percents[0], (before, after)


def test_a_dead_holder_gives_way(card: Card) -> None:
    dying, living = card.lease("a", CONSERVING, 50), card.lease("b", CONSERVING, 50)
    victim = card.spin(dying, LONG)
    other = card.spin(living, 3.0)
    span(dying, living, turns=3, seconds=0)
    victim.kill()
    assert sum(windows(other)[-4:]) > 0


def test_a_stopped_holder_is_bypassed(card: Card) -> None:
    stopped, living = card.lease("a", CONSERVING, 50), card.lease("b", CONSERVING, 50)
    victim = card.spin(stopped, LONG)
    other = card.spin(living, 3.0)
    span(stopped, living, turns=3, seconds=0)
    before = counters(stopped)["bypasses"]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        assert sum(windows(other)[-4:]) > 0
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert counters(stopped)["bypasses"] - before <= 2  # it is not waited for again until it answers


def test_limits_hold_without_the_arbiter_and_when_it_is_back(card: Card) -> None:
    lease = card.lease("a", HARD, 25)
    process = card.spin(
        lease, 3.0, "--report-ms", "250", "--begin-at", str(time.monotonic_ns() + 800_000_000)
    )
    time.sleep(0.8 + 0.8)
    card.kill_arbiter()
    time.sleep(1.0)
    card.start_arbiter()
    done = windows(process)
    assert max(a + b for a, b in itertools.pairwise(done)) < 250, done  # of 500 at full speed
    assert min(sum(done[i : i + 3]) for i in range(2, len(done) - 2)) > 0, done  # none hung


def test_a_tenant_without_an_arbiter_keeps_its_share(card: Card) -> None:
    small, large = card.lease("a", HARD, 15), card.lease("b", HARD, 60)
    card.kill_arbiter()
    processes = card.spin(small, 2.0), card.spin(large, 2.0)
    got = [percent(process) for process in processes]
    assert 0 < got[0] < 21 and got[1] < 68, got
    assert got[1] > 1.5 * got[0], got
    card.start_arbiter()


def test_a_tenant_of_two_devices_is_not_deadlocked_by_another(card: Card) -> None:
    leases = [card.lease(name, CONSERVING, 50, devices=2) for name in "ab"]
    single = card.lease("c", CONSERVING, 50)
    for lease in leases:
        for device in ("0", "1"):
            card.spin(lease, LONG, "--device", device)
    card.spin(single, LONG)
    got = span(*leases, *leases, single, ordinals=(0, 0, 1, 1, 0), turns=0, seconds=1.5)
    assert min(got.used) > 0, got  # one that joins a turn on the other device begins none
    here = [got.used[0], got.used[1], got.used[4]]
    assert got.used[4] > 0.15 * sum(here), got  # a third of its device


def test_processes_of_one_tenant_on_two_devices_both_run(card: Card) -> None:
    """The second to ask joins the turn of the first, whether turns are given or not: it waits for none."""
    free = card.lease("a", NONE, 100, devices=2)
    first, second = (card.spin(free, 1.0, "--device", d) for d in ("0", "1"))
    assert min(percent(first), percent(second)) > 0
    assert counters(free, ordinal=1)["waited_ns"] < 2e8
    lent = card.lease("b", CONSERVING, 50, devices=2)
    first = card.spin(lent, 2.5, "--device", "0")
    time.sleep(1.0)
    second = card.spin(lent, 1.0, "--device", "1")
    assert min(percent(first), percent(second)) > 0
    assert counters(lent, ordinal=1)["waited_ns"] < 2e8


@pytest.mark.parametrize("mode", ["multi", "both"])
def test_a_process_on_several_devices_has_a_turn_on_each(card: Card, mode: str) -> None:
    """By one launch on all, and by launches on one after the other: those to the first need no turn."""
    both = card.lease("a", CONSERVING, 50, devices=2)
    single = card.lease("b", CONSERVING, 50, first_device=1)
    card.spin(both, LONG, "--mode", mode)
    card.spin(single, LONG)
    got = span(both, single, ordinals=(1, 0))
    assert 30 < got.parts[0] < 70, got


def test_host_functions_behind_kernels_are_no_way_around_the_share(card: Card) -> None:
    lease = card.lease("a", HARD, 25)
    holds_alone(lease, answer(card.spin(lease, 1.5, "--mode", "callbacks")))


def test_work_that_can_wait_gets_a_turn_in_every_second_or_so(card: Card) -> None:
    waits, normal = card.lease("a", CONSERVING, 50, priority=-1), card.lease("b", CONSERVING, 50)
    for lease in (waits, normal):
        card.spin(lease, LONG)
    got = span(waits, normal, turns=2)
    assert 0 < got.parts[0] < 20, got
    assert got.seconds < 2 * 2 + 4, got  # for the turns, and for the machine


def test_who_goes_first_gets_no_more_than_its_share(card: Card) -> None:
    first, normal = card.lease("a", CONSERVING, 30, priority=1), card.lease("b", CONSERVING, 70)
    for lease in (first, normal):
        card.spin(lease, LONG)
    got = span(first, normal, seconds=1.5)
    assert 20 < got.parts[0] < 40, got


def message(kind: int, turn: int, flags: int, devices: int) -> bytes:
    head = struct.pack("<IIIIq", kind, layout.VERSION, 0, 0, 0)
    return (head + struct.pack("<QQQIIQ", turn, 2**64 - 1, 2**63, flags, devices, 2**64 - 1)).ljust(
        layout.MESSAGE_SIZE, b"\0"
    )


def test_noise_about_turns_does_no_harm(card: Card) -> None:
    """From a process that is not registered, and from one that is."""
    good = card.lease("b", HARD, 40)
    noisy = card.lease("a", HARD, 40)
    dice = random.Random(5)
    process = card.spin(good, 1.5)
    for _ in range(400):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(str(noisy / layout.ARBITER_SOCKET))
            line.send(
                message(
                    dice.choice((WANT, DONE, 6, 7)),
                    dice.randrange(2**64),
                    dice.randrange(2**32),
                    dice.randrange(2**32),
                )
            )
    said = answer(process)
    assert work(said) < 46
    assert 20 < had(good, said) < 46 + 10 / float(said["seconds"])
    assert card.client.ready()


def test_an_idle_node_wakes_nobody(card: Card) -> None:
    leases = [card.lease(name, HARD, 30) for name in "ab"]
    begin = str(time.monotonic_ns() + 30_000_000_000)
    for lease in leases:
        card.spin(lease, 1.0, "--begin-at", begin)
    assert card.arbiter is not None
    pid = card.arbiter.pid

    def sleeps() -> bool:
        before = voluntary(pid)
        time.sleep(1.0)
        return voluntary(pid) == before

    settles(sleeps)  # once its tenants have come


def test_an_idle_lease_costs_one_descriptor(card: Card) -> None:
    def open_descriptors() -> int:
        assert card.arbiter is not None
        return len(list(Path(f"/proc/{card.arbiter.pid}/fd").iterdir()))

    time.sleep(0.1)
    before = open_descriptors()
    leases = [card.lease(f"l{i}", HARD, 10) for i in range(30)]
    settles(lambda: open_descriptors() == before + 30)
    percent(card.spin(leases[7], 0.3))
    settles(lambda: open_descriptors() == before + 30)  # the last connection of a test takes a moment to go
    assert counters(leases[7])["used_ns"] > 0  # published before its files were closed
    card.kill_arbiter()
    card.start_arbiter()
    settles(lambda: open_descriptors() == before + 30)


def settles(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def voluntary(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("nonvoluntary")[0].rsplit("voluntary_ctxt_switches:", 1)[1])


def test_a_tenant_that_is_moved_shares_the_other_card(card: Card) -> None:
    """Its running process goes on in the new card's turns; what it had before stays counted."""
    moved, there = card.lease("a", HARD, 25), card.lease("b", HARD, 75, first_device=1)
    first = card.spin(moved, 3.0)
    assert eventually_turns(moved, 5)
    before = counters(moved)
    limits = card.limits(HARD, 25, first=1)
    write_lease(moved.parent, "a", limits, uid=os.getuid(), gid=os.getgid())
    card.client.add("a")
    assert card.client.list("a") == (first.pid,)
    owner = card.spin(there, 1.5)
    assert eventually_turns(moved, before["turns"] + 5)
    assert 0 < percent(owner) < 80
    answer(first)
    assert counters(moved)["used_ns"] > before["used_ns"]
    assert (moved / layout.MOVED_FILE).read_text() == f"0 {card.uuids[0]}\n"


def eventually_turns(lease: Path, wanted: int) -> bool:
    end = time.monotonic() + 20
    while counters(lease)["turns"] < wanted and time.monotonic() < end:
        time.sleep(0.02)
    return counters(lease)["turns"] >= wanted

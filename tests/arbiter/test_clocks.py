"""Clocks that jump: turns are lengths of CLOCK_MONOTONIC, and no message needs two clocks that agree."""

import itertools
import os
import signal
import subprocess
import time

import pytest

from tests.arbiter.conftest import Card, answer, counters, percent
from tests.native.harness import TEST_BUILD
from vgpud.lease import SharePolicy

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
A_DAY_LATER = ("unshare", "--time", "--fork", "--kill-child", "--monotonic", "86400", "--boottime", "86400")


def shares_hold(card: Card) -> None:
    alone = card.lease("a", HARD, 25)
    assert 12 < percent(card.spin(alone, 1.5)) < 29
    assert counters(alone)["turns"] > 5
    small, large = card.lease("b", CONSERVING, 25), card.lease("c", CONSERVING, 75)
    first, second = card.spin(small, 1.5), card.spin(large, 1.5)
    assert percent(second) > 1.8 * percent(first)
    counted = counters(large)
    assert counted["used_ns"] < 3e9  # no day was charged
    assert counted["bypasses"] <= 1


def test_an_arbiter_in_another_time_namespace(card: Card) -> None:
    """As after a suspend, when the two ends' clocks have gone apart; a container may have its own as well."""
    tried = subprocess.run([*A_DAY_LATER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no time namespace: {tried.stderr.strip()}")
    card.kill_arbiter()
    card.start_arbiter(*A_DAY_LATER)
    shares_hold(card)


def test_a_wall_clock_that_jumps(card: Card) -> None:
    clock = TEST_BUILD / "libwallclock.so"
    card.kill_arbiter()
    card.start_arbiter("env", f"LD_PRELOAD={clock}")
    card.preloads = (clock,)
    shares_hold(card)


def test_a_node_that_stands_still_for_a_second(card: Card) -> None:
    """The arbiter and all tenants, in the middle of turns: nobody pays for it, and nobody is given up."""
    small, large = card.lease("a", CONSERVING, 25), card.lease("b", CONSERVING, 75)
    processes = [card.spin(lease, 4.0, "--report-ms", "250") for lease in (small, large)]
    time.sleep(1.2)
    assert card.arbiter is not None
    pids = [card.arbiter.pid, *(process.pid for process in processes)]
    for word in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, word)
        time.sleep(1.0)
    said = [answer(process) for process in processes]
    late = [[b[1] - a[1] for a, b in itertools.pairwise(line["windows"])][-4:] for line in said]
    assert sum(late[0]) > 0
    assert sum(late[1]) > 1.5 * sum(late[0])
    assert counters(small)["bypasses"] + counters(large)["bypasses"] <= 2

"""Clocks that jump: turns are lengths of CLOCK_MONOTONIC, and no message needs two clocks that agree."""

import os
import signal
import subprocess
import time

from tests.arbiter.conftest import LONG, Card, answer, bypassed_seldom, holds_alone, span
from tests.conditions import unmet
from tests.native.harness import TEST_BUILD
from vgpud.lease import SharePolicy

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
A_DAY_LATER = ("unshare", "--time", "--fork", "--kill-child", "--monotonic", "86400", "--boottime", "86400")


def shares_hold(card: Card) -> None:
    alone = card.lease("a", HARD, 25)
    holds_alone(alone, answer(card.spin(alone, 1.5)))
    small, large = card.lease("b", CONSERVING, 25), card.lease("c", CONSERVING, 75)
    for lease in (small, large):
        card.spin(lease, LONG)
    got = span(small, large)
    assert 12 < got.parts[0] < 36, got
    assert sum(got.percents) < 130, got  # no day was charged
    assert bypassed_seldom(small, large)


def test_an_arbiter_in_another_time_namespace(card: Card) -> None:
    """As after a suspend, when the two ends' clocks have gone apart; a container may have its own as well."""
    tried = subprocess.run([*A_DAY_LATER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        unmet("namespaces", tried.stderr.strip())
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
    processes = [card.spin(lease, LONG) for lease in (small, large)]
    span(small, large, turns=5, seconds=0)
    assert card.arbiter is not None
    pids = [card.arbiter.pid, *(process.pid for process in processes)]
    for word in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, word)
        time.sleep(1.0)
    got = span(small, large)
    assert 12 < got.parts[0] < 40, got
    assert bypassed_seldom(small, large)

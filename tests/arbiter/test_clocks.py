"""Clocks that jump or differ. Time slices are measured by CLOCK_MONOTONIC, and no message between arbiter and
tenant carries a time of day or an absolute time.
"""

import os
import signal
import subprocess
import time

from tests.arbiter.accounts import divide, have_turns, is_bypassed_seldom, is_held_to
from tests.arbiter.conftest import LONG, Card, counters
from tests.conditions import unmet
from tests.native.harness import TEST_BUILD
from vgpud.lease import SharePolicy

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
AN_HOUR_NS = 3600 * 10**9
A_DAY_LATER = ("unshare", "--time", "--fork", "--kill-child", "--monotonic", "86400", "--boottime", "86400")


def shares_hold(card: Card) -> None:
    alone = card.lease("a", HARD, 25)
    lone = card.spin(alone, LONG)
    is_held_to(alone, 25)
    lone.kill()
    small, large = card.lease("b", CONSERVING, 25), card.lease("c", CONSERVING, 75)
    for lease in (small, large):
        card.spin(lease, LONG)
    divide(small, large, least=12, most=36)
    assert all(counters(lease)["used_ns"] < AN_HOUR_NS for lease in (alone, small, large))
    is_bypassed_seldom(small, large)


def test_shares_hold_with_an_arbiter_in_another_time_namespace(card: Card) -> None:
    """The clock of the arbiter differs from that of the tenants, as for a container with a clock of its
    own.
    """
    tried = subprocess.run([*A_DAY_LATER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        unmet("namespaces", tried.stderr.strip())
    card.kill_arbiter()
    card.start_arbiter(*A_DAY_LATER)
    shares_hold(card)


def test_shares_hold_while_the_wall_clock_jumps(card: Card) -> None:
    clock = TEST_BUILD / "libwallclock.so"
    card.kill_arbiter()
    card.start_arbiter("env", f"LD_PRELOAD={clock}")
    card.preloads = (clock,)
    shares_hold(card)


def test_shares_hold_after_the_node_was_stopped_for_a_second(card: Card) -> None:
    """The arbiter and all tenants are stopped during time slices. No tenant loses its share, and few slices
    are bypassed.
    """
    small, large = card.lease("a", CONSERVING, 25), card.lease("b", CONSERVING, 75)
    processes = [card.spin(lease, LONG) for lease in (small, large)]
    have_turns(small, large)
    assert card.arbiter is not None
    pids = [card.arbiter.pid, *(process.pid for process in processes)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)  # longer than a time slice, the wait for its end and its bypass together
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    divide(small, large, least=12, most=40)
    is_bypassed_seldom(small, large)

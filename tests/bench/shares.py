"""Work that tenants of a simulated device complete, compared with their shares, and the cost of the arbiter.

Real processes in real time: on a machine with cores to spare the work is close to the share. The
scheduler alone, on a simulated clock, is exact (tests/arbiter/test_model.py).
"""

import os
import time
from pathlib import Path

from tests.arbiter.accounts import Accounts, have_turns
from tests.arbiter.conftest import LONG, Card, counters, made_card
from tests.bench.common import Report
from vgpud.lease import SharePolicy

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
_SECONDS = 3.0
_TICK = os.sysconf("SC_CLK_TCK")


def run() -> Report:
    report = Report("shares")
    for asked, policy in (((25.0, 75.0), HARD), ((25.0,), HARD), ((20.0, 80.0), CONSERVING)):
        with made_card() as card:
            _shares(report, card, asked, policy)
    for busy in (1, 4):
        with made_card() as card:
            _cost(report, card, busy)
    return report


def _shares(report: Report, card: Card, asked: tuple[float, ...], policy: SharePolicy) -> None:
    leases = [card.lease(f"t{n}", policy, share) for n, share in enumerate(asked)]
    for lease in leases:
        card.spin(lease, LONG)
    for share, percent in zip(asked, _percents(*leases), strict=True):
        what = f"{policy.name.lower()}, {share:g} of {'+'.join(f'{one:g}' for one in asked)}"
        report.value(what, percent, "% of the card", f"promised: {share:g}")


def _cost(report: Report, card: Card, busy: int) -> None:
    leases = [card.lease(f"b{n}", CONSERVING, 60 // busy) for n in range(busy)]
    latency = card.lease("l", CONSERVING, 30, priority=1)
    for lease in leases:
        card.spin(lease, LONG)
    card.spin(latency, LONG, "--every-us", "5000")
    have_turns(*leases, latency)
    assert card.arbiter is not None
    before, began, turns = _cpu_seconds(card.arbiter.pid), time.monotonic(), _turns(*leases, latency)
    time.sleep(_SECONDS)
    passed = time.monotonic() - began
    percent = 100 * (_cpu_seconds(card.arbiter.pid) - before) / passed
    per_second = (_turns(*leases, latency) - turns) / passed
    what = f"the arbiter, {busy} busy and a latency tenant"
    report.value(what, percent, "% of a core", f"at {per_second:.0f} turns a second; aim: below 25")


def _percents(*leases: Path) -> list[float]:
    """Device time that the arbiter charges to each lease while all of them want the device, in percent."""
    have_turns(*leases, turns=1)
    account, began = Accounts(*leases), time.monotonic()
    time.sleep(_SECONDS)
    have_turns(*leases, turns=10)
    used_ns, passed = account.since("used_ns"), time.monotonic() - began
    return [100e-9 * used / passed for used in used_ns]


def _turns(*leases: Path) -> int:
    return sum(counters(lease)["turns"] for lease in leases)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK

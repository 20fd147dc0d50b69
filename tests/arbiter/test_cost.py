"""What the arbiter takes of a core. By the model: `sched-exact alert`; on a card: compute_h200.py."""

import os
import time
from pathlib import Path

import pytest

from tests.arbiter.conftest import Card, answer
from vgpud.lease import SharePolicy

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def arbiter_cpu_percent(card: Card, busy: int, latency: bool) -> float:
    share = 60 // busy
    leases = [card.lease(f"b{busy}{i}", SharePolicy.WORK_CONSERVING, share) for i in range(busy)]
    begin = time.monotonic_ns() + 1_000_000_000
    words = ("--begin-at", str(begin))
    processes = [card.spin(lease, 2.0, *words) for lease in leases]
    if latency:
        lease = card.lease(f"l{busy}", SharePolicy.WORK_CONSERVING, 30, priority=1, quantum_us=1000)
        processes.append(card.spin(lease, 2.0, *words, "--every-us", "5000"))
    time.sleep(1.3)
    assert card.arbiter is not None
    before, began = cpu_seconds(card.arbiter.pid), time.monotonic()
    time.sleep(1.5)
    percent = 100 * (cpu_seconds(card.arbiter.pid) - before) / (time.monotonic() - began)
    for process in processes:
        answer(process)
    return percent


def test_the_arbiter_sleeps_between_hand_overs(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking without sleeping, it would take all that the machine has left."""
    several, latency = arbiter_cpu_percent(card, 4, False), arbiter_cpu_percent(card, 1, True)
    with capsys.disabled():
        print(
            f"\narbiter: {several:.1f} % of a core with 4 busy tenants, {latency:.1f} % with a latency tenant"
        )
    assert several < 25
    assert latency < 60

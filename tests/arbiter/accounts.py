"""Conditions on the arbiter's accounts that come true even on a slow machine.

These tests run real processes under the real arbiter. The scheduler's exact shares are tested in
test_model.py on a simulated clock, and measured on a device by `./dev bench shares`.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.arbiter.conftest import Card, answer, counters
from tests.e2e.support import eventually
from vgpud.lease import read_meters


def launches(lease: Path) -> int:
    """Number of kernels that the processes of a lease with one device have launched."""
    (meter,) = read_meters(lease, 1)
    return meter.memory.launches


def throttled_ns(lease: Path) -> int:
    """Nanoseconds for which libvgpu itself has delayed launches, without an order of the arbiter."""
    (meter,) = read_meters(lease, 1)
    return meter.memory.throttled_ns


def works(process: "subprocess.Popen[str]") -> bool:
    """Waits for the end of a short process. Returns true if it completed kernels."""
    return float(answer(process)["per_second"]) > 0


def goes_on(lease: Path, more: int = 100) -> None:
    """Waits until the lease's processes have launched `more` further kernels."""
    wanted = launches(lease) + more
    eventually(lambda: launches(lease) >= wanted, f"{more} launches more of {lease.name}")


class Accounts:
    """How much the counters of leases (time used, time waited, time slices) have grown since this object was
    made. `ordinals` names one device of each lease.
    """

    def __init__(self, *leases: Path, ordinals: tuple[int, ...] = ()) -> None:
        self._where = list(zip(leases, ordinals or (0,) * len(leases), strict=True))
        self._before = [counters(*one) for one in self._where]

    def since(self, name: str) -> list[int]:
        return [counters(*one)[name] - was[name] for one, was in zip(self._where, self._before, strict=True)]

    @property
    def part(self) -> float:
        """The use of the first lease, in percent of the use of all."""
        used = self.since("used_ns")
        return 100 * used[0] / max(sum(used), 1)

    @property
    def percent(self) -> float:
        """The use of the first lease, in percent of the time in which it wanted the device."""
        (used, *_), (waited, *_) = self.since("used_ns"), self.since("waited_ns")
        return 100 * used / max(used + waited, 1)

    def come_to(self, holds: Callable[["Accounts"], bool], what: str, turns: int = 10) -> None:
        """Waits until each lease has had `turns` time slices and `holds` is true."""
        eventually(lambda: min(self.since("turns")) >= turns and holds(self), f"{what} ({self._shown()})")

    def _shown(self) -> str:
        names = ", ".join(lease.name for lease, _ in self._where)
        return f"of {names}"


def have_turns(*leases: Path, ordinals: tuple[int, ...] = (), turns: int = 5) -> None:
    """Waits until each lease has had this many further time slices."""
    Accounts(*leases, ordinals=ordinals).come_to(lambda _: True, f"{turns} turns for each", turns)


def divide(*leases: Path, least: float, most: float, ordinals: tuple[int, ...] = ()) -> None:
    """Waits until the use of the first lease, in percent of the use of all, lies between `least` and
    `most`.
    """
    have_turns(*leases, ordinals=ordinals, turns=1)  # from here on, all leases want the device
    what = f"a part between {least:g} and {most:g} %"
    Accounts(*leases, ordinals=ordinals).come_to(lambda got: least < got.part < most, what)


def done_ns(card: Card, *pids: int) -> int:
    """Nanoseconds of work that the device has done for these processes."""
    return sum(
        use["done_ns"] for one in card.sim.dump()["processes"] if one["pid"] in pids for use in one["uses"]
    )


def device_works(card: Card, pid: int, milliseconds: float = 0) -> None:
    """Waits until the device has done work of this length for the process, from now on."""
    before = done_ns(card, pid)
    eventually(lambda: done_ns(card, pid) > before + milliseconds * 1e6, f"the device works for {pid}")


def is_cut_to(card: Card, lease: Path, percent: float, *pids: int) -> None:
    """Waits as is_held_to does. Then asserts that the arbiter charges all work that the device does for the
    processes of the lease, whose pids are `pids`.
    """
    have_turns(lease, turns=1)  # a new arbiter charges a lease only from its next time slice on
    account, before = Accounts(lease), done_ns(card, *pids)
    is_held_to(lease, percent)
    done = done_ns(card, *pids) - before
    have_turns(lease, turns=2)  # the work of the slice in progress is charged at its end
    # a tenant with 25 % that is never preempted does four times the work that is charged
    assert done < 2 * account.since("used_ns")[0], (done, account.since("used_ns"))


def is_held_to(lease: Path, percent: float, turns: int = 10) -> None:
    """Waits until the lease, alone on its device, uses about this percentage of the time in which it wants
    the device. Zero use does not count.
    """
    have_turns(lease, turns=1)
    what = f"about {percent:g} % of its time"
    Accounts(lease).come_to(lambda got: percent / 3 < got.percent < 1.3 * percent, what, turns)


def is_bypassed_seldom(*leases: Path, turns: int = 12) -> None:
    """Waits until less than a quarter of this many successive time slices is bypassed. On a busy machine a
    process may run so late that the arbiter bypasses it.
    """
    account = Accounts(*leases)

    def seldom() -> bool:
        nonlocal account
        if sum(account.since("turns")) < turns:
            return False
        bypassed, account = account, Accounts(*leases)
        return 4 * sum(bypassed.since("bypasses")) < sum(bypassed.since("turns"))

    eventually(seldom, "it is seldom bypassed")

"""The end of a process to which an allocation is bound is noticed once, even if it came before the first
check.
"""

import os
import subprocess

from tests import clock
from vgpud.model.tenancy import Lifetime
from vgpud.node.tenants.lifetimes import Lifetimes, is_alive
from vgpud.proc import has_ended, start_ticks


def of(pid: int) -> Lifetime:
    return Lifetime(pid, start_ticks(pid) or 0)


def test_the_end_of_a_watched_process_is_reported_once() -> None:
    async def work() -> None:
        told: list[str] = []
        lifetimes = Lifetimes(told.append)
        sleeper = subprocess.Popen(["sleep", "60"])
        lifetimes.watch("a", of(sleeper.pid))
        lifetimes.watch("a", of(sleeper.pid))
        lifetimes.watch("mine", of(os.getpid()))
        await clock.settled()
        assert told == []
        sleeper.kill()
        await clock.until(lambda: told)
        await clock.settled()
        assert told == ["a"]
        sleeper.wait()
        lifetimes.close()

    clock.run(work())


def test_a_process_that_has_already_ended_or_whose_pid_is_reused_is_reported_at_once() -> None:
    async def work() -> None:
        told: list[str] = []
        lifetimes = Lifetimes(told.append)
        done = subprocess.Popen(["true"])
        gone = of(done.pid)
        done.wait()
        lifetimes.watch("gone", gone)
        lifetimes.watch("reused", Lifetime(os.getpid(), 1))
        lifetimes.watch("unbound", Lifetime())
        await clock.settled()
        assert sorted(told) == ["gone", "reused"]
        lifetimes.close()

    clock.run(work())


def test_the_end_of_a_process_that_is_no_longer_watched_is_not_reported() -> None:
    async def work() -> None:
        told: list[str] = []
        lifetimes = Lifetimes(told.append)
        sleeper = subprocess.Popen(["sleep", "60"])
        lifetimes.watch("a", of(sleeper.pid))
        lifetimes.forget("a")
        sleeper.kill()
        sleeper.wait()
        await clock.settled()
        assert told == []

    clock.run(work())


def test_a_zombie_process_counts_as_ended() -> None:
    child = subprocess.Popen(["true"])
    bound = of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid)
    assert not is_alive(bound)
    child.wait()
    assert not has_ended(child.pid), "a pid that cannot be seen is not called ended"
    assert not has_ended(os.getpid())
    assert is_alive(of(os.getpid()))

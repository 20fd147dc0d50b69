"""The daemon notifies systemd's watchdog only while it works."""

import asyncio
from typing import Any

import pytest

from vgpud import daemon, sd
from vgpud.model.errors import ErrorCode, VgpuError


class Well:
    status = "8 devices"

    def __init__(self) -> None:
        self.listings = self

    def describe(self) -> "Well":
        return self


class Ledger:
    def __init__(self, error: VgpuError | None = None, hangs: bool = False) -> None:
        self.error, self.hangs = error, hangs

    async def answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


def heard(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Returns the messages that systemd gets during a few rounds of the daemon's loop."""
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(sd, "notify", lambda *words: told.append(words))
    monkeypatch.setattr(sd, "watchdog_seconds", lambda: 0.0)

    async def beat() -> None:
        parts: Any = (Well(), ledger)
        beating = asyncio.ensure_future(daemon.heartbeat(*parts))
        for _ in range(50):
            await asyncio.sleep(0)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(beat())
    return told


def test_a_healthy_daemon_notifies_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    told = heard(Ledger(), monkeypatch)
    assert len(told) > 1
    assert set(told) == {("WATCHDOG=1", "STATUS=8 devices")}


def test_a_daemon_on_a_full_disk_notifies_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    full = VgpuError(ErrorCode.LEDGER_FULL, "the disk is full", "")
    assert heard(Ledger(error=full), monkeypatch) != []


def test_a_daemon_whose_ledger_hangs_does_not_notify_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(Ledger(hangs=True), monkeypatch) == []

"""The survey of preload tenants for memory that libvgpu does not count, on a node of fakes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.world import ALICE, FakeGateway, Remembering, request, world
from vgpud.lease import Registered, UnknownCalls
from vgpud.model.device import DeviceProcess
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Mode
from vgpud.modes.preload import Preload
from vgpud.planner.bypass import CLEAR_SECONDS


class Leases(Remembering, Preload):
    """The lease of a tenant with one process, which holds `held_bytes` that libvgpu counts."""

    def __init__(self, held_bytes: int) -> None:
        Remembering.__init__(self, Mode.PRELOAD, pids=(os.getpid(),))
        self.held_bytes = held_bytes
        self.walls = SimpleNamespace(refusal=lambda _: None)  # type: ignore[assignment]
        self.refusal = ""

    def registered(self, allocation_id: str) -> Registered:
        return Registered(self.pids, refusal=self.refusal)

    def unknown_calls(self, allocation_id: str) -> UnknownCalls:
        return UnknownCalls(0, "")

    def learn(self, allocation_id: str) -> None: ...

    def counted(self, allocation: Allocation) -> tuple[int, ...]:
        return (self.held_bytes,)


@dataclass
class Card(FakeGateway):
    processes_of: Sequence[DeviceProcess] = ()

    def processes(self, uuid: str) -> Sequence[DeviceProcess]:
        return self.processes_of


@pytest.mark.parametrize(
    ("held_gib", "marked"),
    [(3, False), (6, True)],
    ids=["within its first limit", "above its first limit"],
)
def test_a_tenant_whose_limit_is_lowered_before_its_first_survey_may_hold_as_much_as_its_first_limit(
    tmp_path: Path, held_gib: int, marked: bool
) -> None:
    leases = Leases(held_gib * GIB)
    card = Card(processes_of=(DeviceProcess(os.getpid(), held_gib * GIB, "compute"),))

    async def work() -> None:
        async with world(tmp_path, card, preload=leases) as w:
            held = await w.keeper.allocate(request("r", gib=4))
            lowered = await w.keeper.resize(held.id, ALICE, GIB, None)
            await w.keeper.bypasses.look()
            assert [mark.kind.value for mark in w.keeper.bypasses.marks(lowered)] == ["bypassed"] * marked

    clock.run(work())


Change = Callable[[Leases, Card, bool], None]


def holds_more(leases: Leases, card: Card, does: bool) -> None:
    card.processes_of = (DeviceProcess(os.getpid(), 8 * GIB, "compute"),) if does else ()


def is_not_preempted(leases: Leases, card: Card, does: bool) -> None:
    leases.refusal = "status 0x56" if does else ""


@pytest.mark.parametrize(
    ("change", "kind", "seconds"),
    [(holds_more, "bypassed", CLEAR_SECONDS), (is_not_preempted, "gated", 0.0)],
    ids=["bypassed", "gated"],
)
def test_a_mark_comes_and_goes_with_its_reason_although_the_ledger_fails_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, kind: str, seconds: float
) -> None:
    monkeypatch.setattr("vgpud.node.tenants.bypasses._READING_PAUSE_SECONDS", 0)
    leases, card = Leases(0), Card()

    async def full(*_: object) -> None:
        raise VgpuError(ErrorCode.LEDGER_FAILED, "the disk is full", "")

    async def work() -> None:
        async with world(tmp_path, card, preload=leases) as w:
            held = await w.keeper.allocate(request("r", gib=4))

            async def fails_once(change: str) -> None:
                before = marks()
                with monkeypatch.context() as patch:
                    patch.setattr(w.keeper.store, change, full)
                    await w.keeper.bypasses.look()
                    assert marks() == before
                await w.keeper.bypasses.look()

            def marks() -> list[str]:
                return [mark.kind.value for mark in w.keeper.bypasses.marks(held)]

            await w.keeper.bypasses.look()
            assert marks() == []
            change(leases, card, True)
            await fails_once("mark")
            assert marks() == [kind]
            change(leases, card, False)
            if seconds:
                await w.keeper.bypasses.look()
                await clock.passed(seconds)
            await fails_once("unmark")
            assert marks() == []

    with capture_logs() as lines:
        clock.run(work())
    failures = [line["event"] for line in lines if line["log_level"] == "error"]
    assert failures == ["allocation_mark_not_recorded", "allocation_mark_not_removed"]

"""The survey of preload tenants for memory that libvgpu does not count, on a node of fakes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import clock
from tests.node.world import ALICE, FakeGateway, Remembering, request, world
from vgpud.lease import Registered, UnknownCalls
from vgpud.model.device import DeviceProcess
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Mode
from vgpud.modes.preload import Preload


class Leases(Remembering, Preload):
    """The lease of a tenant with one process, which holds `held_bytes` that libvgpu counts."""

    def __init__(self, held_bytes: int) -> None:
        Remembering.__init__(self, Mode.PRELOAD, pids=(os.getpid(),))
        self.held_bytes = held_bytes
        self.walls = SimpleNamespace(refusal=lambda _: None)  # type: ignore[assignment]

    def registered(self, allocation_id: str) -> Registered:
        return Registered(self.pids)

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

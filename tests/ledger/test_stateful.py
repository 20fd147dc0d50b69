"""Random sequences of calls and restarts of the ledger, compared with a dictionary."""

import asyncio
import tempfile
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.examples import examples
from tests.ledger.samples import active, allocation, event, ledger_path
from vgpud.ledger import Durability, Ledger, RowTable
from vgpud.ledger.tables import EVENTS_KEPT
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.tenancy import Allocation, State

T = TypeVar("T")
numbers = st.integers(0, 5)
durabilities = st.sampled_from(Durability)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = ledger_path(Path(self.folder.name))
        self.loop = asyncio.new_event_loop()
        self.ledger = self.run(Ledger.open(self.path))
        self.held: dict[str, Allocation] = {}
        self.originals: dict[tuple[str, str], str] = {}
        self.events: list[tuple[int, str]] = []
        self.boot = ""
        self.floor = 0

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.loop.run_until_complete(wait())

    def teardown(self) -> None:
        self.run(self.ledger.close())
        self.loop.close()
        self.folder.cleanup()

    def told(self, revision: int, subject: str) -> None:
        assert revision > self.revision
        self.events.append((revision, subject))

    @property
    def revision(self) -> int:
        return max(self.floor, self.events[-1][0] if self.events else 0)

    @rule(number=numbers, request=numbers, durability=durabilities)
    def begin(self, number: int, request: int, durability: Durability) -> None:
        wanted = allocation(number, request=allocation(request).request)
        taken = {a.request.id for a in self.held.values()}
        try:
            self.run(self.ledger.intent(wanted, durability=durability))
        except VgpuError as error:
            reused = wanted.request.id in taken
            assert error.code is (ErrorCode.REQUEST_ID_REUSED if reused else ErrorCode.BUG)
            assert reused or wanted.id in self.held
        else:
            assert wanted.id not in self.held and wanted.request.id not in taken
            self.held[wanted.id] = wanted

    @rule(number=numbers, state=st.sampled_from([State.RESIZING, State.RELEASING]))
    def change(self, number: int, state: State) -> None:
        known = self.held.get(f"a{number}")
        wanted = replace(known or allocation(number), state=state)
        try:
            self.run(self.ledger.intent(wanted))
        except VgpuError as error:
            assert known is None and error.code is ErrorCode.NO_SUCH_ALLOCATION
        else:
            self.held[wanted.id] = wanted

    @rule(number=numbers, durability=durabilities)
    def commit(self, number: int, durability: Durability) -> None:
        known = self.held.get(f"a{number}")
        wanted = active(known or allocation(number))
        try:
            done = self.run(self.ledger.commit(wanted, event(wanted.id), durability=durability))
        except VgpuError as error:
            assert known is None and error.code is ErrorCode.NO_SUCH_ALLOCATION
        else:
            self.told(done.revision, wanted.id)
            self.held[wanted.id] = done

    @rule(number=numbers, aloud=st.booleans())
    def forget(self, number: int, aloud: bool) -> None:
        known = self.held.pop(f"a{number}", None)
        told = self.run(self.ledger.forget(f"a{number}", event(f"a{number}") if aloud else None))
        assert (told is not None) == (aloud and known is not None)
        if told is not None:
            self.told(told.revision, told.subject)

    @rule(number=numbers, value=st.text(max_size=5))
    def record(self, number: int, value: str) -> None:
        self.run(self.ledger.rows[RowTable.ORIGINALS].put((f"GPU-{number}", "mode", value)))
        self.originals[f"GPU-{number}", "mode"] = value

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        self.run(self.ledger.rows[RowTable.ORIGINALS].drop(f"GPU-{number}", "mode"))
        self.originals.pop((f"GPU-{number}", "mode"), None)

    @rule(number=numbers)
    def tell(self, number: int) -> None:
        told = self.run(self.ledger.event(EventKind.DEVICE_CHANGED, f"GPU-{number}", "it changed"))
        self.told(told.revision, told.subject)

    @rule(boot=st.sampled_from(["one", "two"]))
    def restart(self, boot: str) -> None:
        self.run(self.ledger.close())
        self.ledger = self.run(Ledger.open(self.path))
        revision = self.run(self.ledger.set_boot_id(boot))
        assert revision >= self.revision
        self.floor, self.boot = revision, boot

    @invariant()
    def agrees(self) -> None:
        state = self.run(self.ledger.load())
        assert {a.id: a for a in state.allocations} == self.held
        rows = set(self.ledger.rows[RowTable.ORIGINALS])
        assert rows == {(*key, value) for key, value in self.originals.items()}
        assert (state.revision, state.boot_id) == (self.revision, self.boot)
        events = self.run(self.ledger.events_after(0, EVENTS_KEPT))
        assert [(e.revision, e.subject) for e in events] == self.events


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(20), stateful_step_count=25)

"""Moves of suspended tenants, with a fake driver that records its calls: failed moves, and concurrent
changes.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests import clock
from tests.node.world import ROOT, FakeGateway, World, device, request, world
from vgpud.hardware.suspender import ProcessState, Suspender
from vgpud.model.caller import Caller, Door
from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import (
    Allocation,
    Edits,
    Isolation,
    Lifetime,
    Mode,
    Owner,
    Selector,
    Slice,
    State,
    SuspendedProcess,
)
from vgpud.node.tenants.checks import settled
from vgpud.planner.places import devices_of
from vgpud.proc import start_ticks

NODE = Node(devices=tuple(device(i) for i in range(4)), driver_version="580.159.04")
#: The suspended process is the test's own, because vgpud suspends only processes of the allocation's owner.
OWNER = Caller(Door.TENANT, os.getuid(), os.getgid(), Lifetime())


@dataclass
class Driver:
    """Replaces a Suspender and its sessions. Records the states of processes and the device maps of
    restores.
    """

    states: dict[int, ProcessState] = field(default_factory=dict)
    told: list[Mapping[str, str] | None] = field(default_factory=list)
    gate: asyncio.Event | None = None
    closing: asyncio.Event | None = None

    async def settle(self) -> None:
        pass

    @asynccontextmanager
    async def session(self, user: int, tenant: str) -> AsyncIterator["Driver"]:
        if self.gate is not None:
            await self.gate.wait()
        yield self
        if self.closing is not None:
            await self.closing.wait()

    async def state(self, process: SuspendedProcess) -> ProcessState | None:
        return self.states.get(process.pid)

    async def lock(self, process: SuspendedProcess, seconds: float) -> None:
        self.states[process.pid] = ProcessState.LOCKED

    async def save(self, process: SuspendedProcess, seconds: float) -> None:
        self.states[process.pid] = ProcessState.SAVED

    async def restore(
        self, process: SuspendedProcess, seconds: float, moved: Mapping[str, str] | None = None
    ) -> None:
        self.told.append(moved)
        self.states[process.pid] = ProcessState.LOCKED

    async def unlock(self, process: SuspendedProcess) -> None:
        self.states[process.pid] = ProcessState.RUNNING


@asynccontextmanager
async def sleeping(folder: Path, **asked: Any) -> AsyncIterator[tuple[World, Driver, Allocation]]:
    """A suspended tenant with one process, on the first of four devices."""
    driver = Driver({os.getpid(): ProcessState.RUNNING})
    async with world(folder, FakeGateway(NODE), cast(Suspender, driver)) as w:
        w.effectors[Mode.PRELOAD].pids = w.effectors[Mode.EXCLUSIVE].pids = (os.getpid(),)
        held = await w.keeper.allocate(request("r", owner=Owner(OWNER.uid, OWNER.gid), **asked))
        away = await w.keeper.suspend(held.id, OWNER)
        assert [process.start_ticks for process in away.suspended] == [start_ticks(os.getpid())]
        yield w, driver, away


async def on_record(w: World) -> Allocation:
    (only,) = (await w.ledger.load()).allocations
    return only


def uuid(index: int) -> str:
    return NODE.devices[index].uuid


def test_moves_of_a_suspended_tenant_call_the_driver_only_at_its_resume(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            for to in (1, 2):
                moved = await w.keeper.moves.move(away.id, OWNER, [uuid(to)], "")
                assert (moved.state, devices_of(moved)) == (State.SUSPENDED, (uuid(to),))
                assert moved.suspended[0].saved_on == uuid(0)
                assert await on_record(w) == moved
                assert w.effectors[Mode.PRELOAD].applied == {uuid(to)}
            assert driver.told == []
            await w.keeper.resume(away.id, OWNER)
            a, b, c, d = (uuid(i) for i in range(4))
            assert driver.told == [{a: c, c: a, b: b, d: d}]
            assert (await on_record(w)).suspended == ()

    clock.run(work())


def test_a_suspended_tenant_that_cannot_be_attached_to_the_new_device_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            preload = w.effectors[Mode.PRELOAD]
            plain = preload.attach

            async def attach(allocation: Allocation, part: Slice, there: Device) -> tuple[Slice, Edits]:
                if there.uuid != uuid(0):
                    raise VgpuError(ErrorCode.LEASE_FAILED, "the disk is full", "make room")
                return await plain(allocation, part, there)

            monkeypatch.setattr(preload, "attach", attach)
            with pytest.raises(VgpuError, match="disk is full"):
                await w.keeper.moves.move(away.id, OWNER, [uuid(1)], "")
            now = await on_record(w)
            assert replace(now, revision=0) == replace(away, revision=0)
            assert w.keeper.book.get(away.id) == now
            assert w.parts.book.use_of(uuid(1)).count == 0
            await w.keeper.resume(away.id, OWNER)
            assert driver.told == [None]

    clock.run(work())


def test_a_suspended_tenant_that_fails_to_attach_is_resumed_later(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            w.effectors[Mode.PRELOAD].fail = {"attach"}
            with pytest.raises(VgpuError, match="told to fail"):
                await w.keeper.moves.move(away.id, OWNER, [uuid(1)], "")
            with pytest.raises(VgpuError, match="is being moved"):
                settled(w.keeper.book.get(away.id))
            w.effectors[Mode.PRELOAD].fail = set()
            running = await w.keeper.resume(away.id, OWNER)
            assert (running.state, devices_of(running)) == (State.ACTIVE, (uuid(0),))
            assert not running.moves
            assert driver.told == [None]

    clock.run(work())


def test_other_changes_are_refused_during_a_suspended_move(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            driver.gate = asyncio.Event()
            moving = asyncio.ensure_future(w.keeper.moves.move(away.id, OWNER, [uuid(1)], ""))
            while not w.keeper.book.get(away.id).moves:
                await asyncio.sleep(0)
            for other in (
                w.keeper.resume(away.id, OWNER),
                w.keeper.suspend(away.id, OWNER),
                w.keeper.moves.move(away.id, ROOT, [uuid(2)], ""),
            ):
                with pytest.raises(VgpuError) as refused:
                    await other
                assert refused.value.code is ErrorCode.ALLOCATION_BUSY
            driver.gate.set()
            assert devices_of(await moving) == (uuid(1),)

    clock.run(work())


def test_a_moved_tenant_can_be_moved_again(tmp_path: Path) -> None:
    """The second move waits until the helper process of the first move has ended."""

    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            driver.closing = asyncio.Event()
            first = asyncio.ensure_future(w.keeper.moves.move(away.id, OWNER, [uuid(1)], ""))
            while devices_of(w.keeper.book.get(away.id)) != (uuid(1),) or w.keeper.book.get(away.id).moves:
                await asyncio.sleep(0)
            others = [
                asyncio.ensure_future(w.keeper.moves.move(away.id, OWNER, [uuid(2)], "")),
                asyncio.ensure_future(w.keeper.suspend(away.id, OWNER)),
            ]
            await clock.settled()
            assert not any(other.done() for other in others)
            assert devices_of(w.keeper.book.get(away.id)) == (uuid(1),)
            driver.closing.set()
            await asyncio.gather(first, *others)
            assert devices_of(w.keeper.book.get(away.id)) == (uuid(2),)

    clock.run(work())


def test_of_two_concurrent_resumes_only_one_runs(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            both = [w.keeper.resume(away.id, OWNER) for _ in range(2)]
            done = await asyncio.gather(*both, return_exceptions=True)
            assert [one for one in done if isinstance(one, BaseException)] != done
            assert len(driver.told) == 1
            assert w.keeper.book.get(away.id).state is State.ACTIVE

    clock.run(work())


def test_a_process_that_began_to_use_cuda_during_the_suspension_blocks_a_move(tmp_path: Path) -> None:
    """libvgpu cannot stop a process that began to use CUDA during the suspension. The process would keep
    using the old device, so the move is refused.
    """

    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            driver.states[child.pid] = ProcessState.RUNNING
            w.effectors[Mode.PRELOAD].pids += (child.pid,)
            with pytest.raises(VgpuError, match=rf"process {child.pid} .* began to use CUDA"):
                await w.keeper.moves.move(away.id, OWNER, [uuid(1)], "")
            assert devices_of(w.keeper.book.get(away.id)) == (uuid(0),)
            assert not w.keeper.book.get(away.id).moves

    # the child belongs to the test's user, as the allocation does
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            clock.run(work())
        finally:
            child.kill()


def test_a_suspended_tenant_of_a_whole_card_moves_to_a_card_in_use_without_changing_its_mode(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with sleeping(tmp_path, isolation=Isolation.DEVICE, memory_bytes=None) as (w, _, away):
            there = next(uuid(i) for i in range(4) if uuid(i) not in devices_of(away))
            await w.keeper.allocate(request("other", selector=Selector(uuids=(there,))))
            await w.keeper.moves.move(away.id, OWNER, [there], "")
            assert w.parts.book.use_of(there).mode is Mode.PRELOAD
            with pytest.raises(VgpuError) as refused:
                await w.keeper.resume(away.id, OWNER)
            assert refused.value.code is ErrorCode.DEVICE_IN_USE

    clock.run(work())


def test_a_drain_moves_a_suspended_whole_card_only_to_a_device_where_it_can_be_resumed(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with sleeping(tmp_path, isolation=Isolation.DEVICE, memory_bytes=None) as (w, _, away):
            (here,) = devices_of(away)
            others = [
                await w.keeper.allocate(request(f"r{n}", isolation=Isolation.DEVICE, memory_bytes=None))
                for n in range(3)
            ]
            drained = await w.keeper.relocations.evacuate(here, ROOT)
            ((name, why),) = drained.staying
            assert (name, devices_of(w.keeper.book.get(name))) == (away.id, (here,))
            assert why.endswith("needs the whole device"), "no hint to name another device"
            await w.keeper.release(others[1].id, ROOT, force=True)
            (moved,) = (await w.keeper.relocations.evacuate(here, ROOT)).moved
            assert moved.target == others[1].slices[0].device_uuid
            await w.keeper.resume(away.id, OWNER)

    clock.run(work())

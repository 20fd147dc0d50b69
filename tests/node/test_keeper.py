"""Allocate, release and resize are idempotent, are undone on failure, and never exceed the capacity."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import clock
from tests.conditions import needs
from tests.fusefile import locked_in_the_kernel
from tests.node.world import ALICE, BOB, ROOT, FakeGateway, request, world
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import EventKind
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Isolation, Mode, Owner, State, Workload


def test_an_allocation_that_is_released_leaves_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            assert held.state is State.ACTIVE
            assert held.slices[0].memory_bytes == 4 * GIB
            assert [held.id in name for name in w.specs()] == [True]
            assert await w.keeper.release(held.id, ALICE, force=False) is False
            assert w.is_empty()
            assert await w.keeper.release(held.id, ALICE, force=False) is True
            state = await w.ledger.load()
            assert state.allocations == ()

    clock.run(work())


def test_a_repeated_request_makes_a_single_allocation(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            at_once = await asyncio.gather(*(w.keeper.allocate(request("r")) for _ in range(8)))
            later = await w.keeper.allocate(request("r"))
            assert {a.id for a in (*at_once, later)} == {later.id}
            assert w.effectors[Mode.PRELOAD].calls.count("attach") == 1

    clock.run(work())


@pytest.mark.parametrize("during", [False, True])
def test_a_request_id_with_another_body_is_refused(tmp_path: Path, during: bool) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            if during:
                w.effectors[Mode.PRELOAD].gate = asyncio.Event()
            first = asyncio.ensure_future(w.keeper.allocate(request("r")))
            await asyncio.sleep(0)
            if not during:
                await first
            with pytest.raises(VgpuError) as refused:
                await w.keeper.allocate(request("r", gib=5))
            assert refused.value.code is ErrorCode.REQUEST_ID_REUSED
            if (gate := w.effectors[Mode.PRELOAD].gate) is not None:
                gate.set()
            assert (await first).slices[0].memory_bytes == 4 * GIB

    clock.run(work())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_id_belongs_to_its_user(tmp_path: Path, at_once: bool) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            asked = [request("r", owner=Owner(uid, uid), gib=4) for uid in (1000, 1001)]
            if at_once:
                held = await asyncio.gather(*map(w.keeper.allocate, asked))
            else:
                held = [await w.keeper.allocate(one) for one in asked]
            assert held[0].id != held[1].id
            assert [await w.keeper.allocate(one) for one in asked] == held
            assert len((await w.ledger.load()).allocations) == 2

    clock.run(work())


@pytest.mark.parametrize("step", ["apply", "attach"])
def test_an_allocation_that_fails_half_way_is_undone(tmp_path: Path, step: str) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            w.effectors[Mode.PRELOAD].fail = {step}
            with pytest.raises(VgpuError, match="told to fail"):
                await w.keeper.allocate(request("r"))
            assert w.is_empty()
            assert (await w.ledger.load()).allocations == ()
            w.effectors[Mode.PRELOAD].fail = set()
            assert (await w.keeper.allocate(request("r"))).state is State.ACTIVE

    clock.run(work())


def test_a_failed_undo_of_an_allocation_is_retried(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            w.effectors[Mode.PRELOAD].fail = {"attach", "detach"}
            with pytest.raises(VgpuError, match="attach was told to fail"):
                await w.keeper.allocate(request("r"))
            assert len(w.parts.book) == 1
            w.effectors[Mode.PRELOAD].fail = set()
            await clock.passed(10)
            assert w.is_empty()

    clock.run(work())


def test_an_unwritable_folder_of_cdi_specs_undoes_the_allocation(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            (tmp_path / "cdi").write_text("in the way")
            with pytest.raises(VgpuError) as failed:
                await w.keeper.allocate(request("r"))
            assert failed.value.code is ErrorCode.CDI_FAILED
            assert len(w.parts.book) == 0
            assert not w.effectors[Mode.PRELOAD].attached

    clock.run(work())


@needs("root", "fuse")
def test_a_user_that_locks_the_cdi_folder_in_the_kernel_delays_no_other_call(tmp_path: Path) -> None:
    """A user keeps the folder of CDI specs locked. Allocations are refused, although their writes may end
    later. When the lock is gone, no spec of a refused allocation is left, and the next allocation succeeds.
    """

    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("before"))
            with locked_in_the_kernel(tmp_path / "cdi", tmp_path / "mount"):
                w.parts.specs.patience_seconds = 0.2
                for name in ("waits", "is refused at once"):
                    with pytest.raises(VgpuError, match="the kernel has not finished a change in") as late:
                        await w.keeper.allocate(request(name))
                    assert late.value.code is ErrorCode.CDI_FAILED
                with pytest.raises(VgpuError, match="the kernel has not finished"):
                    await w.keeper.release(held.id, ALICE, force=False)
                assert w.keeper.book.get(held.id).state is State.RELEASING
            w.parts.specs.patience_seconds = 60.0
            await clock.until(lambda: len(w.parts.book) <= 1 and len(w.specs()) <= 1)
            await w.keeper.release(held.id, ALICE, force=False)
            assert w.is_empty()
            after = await w.keeper.allocate(request("after"))
            assert [after.id in name for name in w.specs()] == [True]

    asyncio.run(work())


def test_concurrent_requests_never_exceed_the_devices_memory(tmp_path: Path) -> None:
    """Two devices of 80 GiB hold ten allocations of 16 GiB and no eleventh, in whatever order the requests
    arrive.
    """

    async def work() -> None:
        async with world(tmp_path) as w:
            answers = await asyncio.gather(
                *(w.keeper.allocate(request(f"r{i}", gib=16)) for i in range(14)), return_exceptions=True
            )
            refused = [a for a in answers if isinstance(a, VgpuError)]
            assert len(refused) == 4
            assert {e.code for e in refused} == {ErrorCode.NO_CAPACITY}
            assert all(u.memory_bytes == 80 * GIB for u in w.parts.book.use.values())

    clock.run(work())


def test_only_the_owner_or_root_can_release_an_allocation(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            with pytest.raises(VgpuError) as denied:
                await w.keeper.release(held.id, BOB, force=True)
            assert denied.value.code is ErrorCode.NOT_OWNER
            await w.keeper.release(held.id, ROOT, force=False)
            assert w.is_empty()

    clock.run(work())


def test_a_release_with_living_tenants_is_refused_unless_forced(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            w.effectors[Mode.PRELOAD].pids = (4711, 4712)
            with pytest.raises(VgpuError, match=r"still has 2 processes \(pid 4711, 4712") as alive:
                await w.keeper.release(held.id, ALICE, force=False)
            assert alive.value.code is ErrorCode.TENANT_ALIVE
            assert w.keeper.book.get(held.id).state is State.ACTIVE
            await w.keeper.release(held.id, ALICE, force=True)
            assert w.is_empty()

    clock.run(work())


def test_a_release_that_fails_can_be_repeated(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            w.effectors[Mode.PRELOAD].fail = {"detach"}
            with pytest.raises(VgpuError, match="detach was told to fail"):
                await w.keeper.release(held.id, ALICE, force=False)
            assert w.keeper.book.get(held.id).state is State.RELEASING
            w.effectors[Mode.PRELOAD].fail = set()
            await w.keeper.release(held.id, ALICE, force=False)
            assert w.is_empty()

    clock.run(work())


def test_a_device_stays_in_its_mode_while_it_has_tenants(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            mps = w.effectors[Mode.MPS]
            ask: dict[str, Any] = {"isolation": Isolation.COMPUTE}
            first = await w.keeper.allocate(request("a", **ask))
            second = await w.keeper.allocate(request("b", **ask))
            assert mps.calls.count("apply") == 1
            await w.keeper.release(first.id, ALICE, force=False)
            assert mps.applied == {second.slices[0].device_uuid}
            await w.keeper.release(second.id, ALICE, force=False)
            assert mps.applied == set()

    clock.run(work())


def test_a_request_that_arrives_while_its_device_leaves_the_mode_is_served(tmp_path: Path) -> None:
    """vgpud puts the device back into the mode before it attaches the allocation's slice."""

    async def work() -> None:
        async with world(tmp_path, FakeGateway(Node(devices=FakeGateway().node.devices[:1]))) as w:
            ask: dict[str, Any] = {"isolation": Isolation.COMPUTE}
            for turn in range(20):
                held = await w.keeper.allocate(request(f"a{turn}", **ask))
                release = asyncio.ensure_future(w.keeper.release(held.id, ALICE, force=False))
                for _ in range(turn):
                    await asyncio.sleep(0)
                newcomer = await w.keeper.allocate(request(f"b{turn}", **ask))
                await release
                assert w.effectors[Mode.MPS].applied == {newcomer.slices[0].device_uuid}
                await w.keeper.release(newcomer.id, ALICE, force=False)
                assert w.is_empty()

    clock.run(work())


def test_a_resize_grows_or_shrinks_an_allocation_and_is_refused_above_the_capacity(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            grown = await w.keeper.resize(held.id, ALICE, 40 * GIB, None)
            assert grown.slices[0].memory_bytes == 40 * GIB
            assert w.parts.book.use_of(grown.slices[0].device_uuid).memory_bytes == 40 * GIB
            with pytest.raises(VgpuError, match="81GiB does not fit") as full:
                await w.keeper.resize(held.id, ALICE, 81 * GIB, None)
            assert full.value.code is ErrorCode.NO_CAPACITY
            assert (await w.ledger.load()).allocations[0].slices[0].memory_bytes == 40 * GIB
            shrunk = await w.keeper.resize(held.id, ALICE, 1 * GIB, None)
            assert shrunk.slices[0].memory_bytes == GIB
            with pytest.raises(VgpuError) as denied:
                await w.keeper.resize(held.id, BOB, 2 * GIB, None)
            assert denied.value.code is ErrorCode.NOT_OWNER

    clock.run(work())


def test_a_missing_driver_is_an_error_of_the_request(tmp_path: Path) -> None:
    async def work() -> None:
        missing = VgpuError(ErrorCode.DRIVER_MISSING, "the NVIDIA driver is not loaded", "load it")
        async with world(tmp_path, FakeGateway(error=missing)) as w:
            with pytest.raises(VgpuError) as refused:
                await w.keeper.allocate(request("r"))
            assert refused.value.code is ErrorCode.DRIVER_MISSING
            assert "not loaded" in w.keeper.listings.describe().hardware_error

    clock.run(work())


def test_watchers_get_each_event_once_and_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            first = await w.keeper.allocate(request("a"))
            seen = []

            async def watch() -> None:
                async for event, _ in w.keeper.store.subscribe(0):
                    seen.append(event)
                    if len(seen) == 5:
                        return

            watcher = asyncio.ensure_future(watch())
            second = await w.keeper.allocate(
                replace(request("b"), workload=Workload("team", "web-1", "main"))
            )
            await w.keeper.resize(second.id, ALICE, 5 * GIB, None)
            await w.keeper.release(first.id, ALICE, force=False)
            await w.keeper.release(second.id, ALICE, force=False)
            await asyncio.wait_for(watcher, 300)
            assert [e.kind for e in seen] == [
                EventKind.ALLOCATION_ACTIVE,
                EventKind.ALLOCATION_ACTIVE,
                EventKind.ALLOCATION_RESIZED,
                EventKind.ALLOCATION_RELEASED,
                EventKind.ALLOCATION_RELEASED,
            ]
            pod = ", of pod team/web-1/main"
            assert [e.sentence.endswith(pod) for e in seen] == [False, True, False, False, True]
            revisions = [e.revision for e in seen]
            assert revisions == sorted(set(revisions))
            assert w.keeper.listings.describe().revision == revisions[-1]

    clock.run(work())


def test_a_lost_device_fails_only_its_own_allocations(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            uuids = [d.uuid for d in w.gateway.node.devices]
            held = [
                await w.keeper.allocate(request(u, selector=replace(request("x").selector, uuids=(u,))))
                for u in uuids
            ]
            await w.keeper.failures.mark_on(uuids[0], "device 0 is lost")
            assert [w.keeper.book.get(a.id).state for a in held] == [State.FAILED, State.ACTIVE]
            assert w.keeper.book.get(held[0].id).failure == "device 0 is lost"
            await w.keeper.release(held[0].id, ALICE, force=False)

    clock.run(work())


def test_an_intent_that_cannot_be_written_to_the_ledger_leaves_the_book_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:

            async def full(*_: object, **__: object) -> None:
                raise VgpuError(ErrorCode.LEDGER_FULL, "the disk is full", "make room")

            with monkeypatch.context() as patched:
                patched.setattr(w.ledger, "intent", full)
                with pytest.raises(VgpuError, match="disk is full"):
                    await w.keeper.allocate(request("r"))
            assert w.is_empty()
            assert w.effectors[Mode.PRELOAD].calls == []
            assert (await w.keeper.allocate(request("r"))).state is State.ACTIVE

    clock.run(work())


def test_a_request_waits_for_the_memory_that_a_release_is_about_to_free(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            first = await w.keeper.allocate(request("a", gib=80))
            await w.keeper.allocate(request("b", gib=80))
            preload = w.effectors[Mode.PRELOAD]
            preload.detach_gate = asyncio.Event()
            release = asyncio.ensure_future(w.keeper.release(first.id, ALICE, force=False))
            await clock.settled()
            newcomer = asyncio.ensure_future(w.keeper.allocate(request("c", gib=80)))
            await clock.settled()
            assert not newcomer.done()
            preload.detach_gate.set()
            assert (await newcomer).slices[0].device_uuid == first.slices[0].device_uuid
            await release

    clock.run(work())

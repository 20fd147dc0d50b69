"""Two changes of one allocation interleave between awaits. No change is lost, and no state is a dead end."""

import asyncio
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import clock
from tests.conditions import needs
from tests.fusefile import locked_in_the_kernel
from tests.node.test_lifetimes import of
from tests.node.test_move_suspended import NODE, OWNER, Driver, on_record, sleeping, uuid
from tests.node.world import ALICE, FakeGateway, World, policy_of, request, world
from vgpud.hardware.suspender import ProcessState, Suspender
from vgpud.inject.cdi import spec_path
from vgpud.inject.specs import Specs
from vgpud.model.device import Health, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.lifecycle import Change
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Isolation, Mode, State
from vgpud.node.cdi_watch import CdiWatch
from vgpud.node.recover import Start, recover
from vgpud.node.tenants.lifetimes import Lifetimes
from vgpud.policy.load import LoadedPolicy
from vgpud.proc import has_ended, start_ticks
from vgpud.units.child import ChildUnits


def one_device() -> FakeGateway:
    return FakeGateway(Node(devices=FakeGateway().node.devices[:1]))


def full() -> VgpuError:
    return VgpuError(ErrorCode.LEDGER_FULL, "the disk is full", "make room")


async def no_room(*_: object, **__: object) -> None:
    raise full()


# --- resize


def test_a_resize_that_cannot_be_applied_leaves_the_old_size(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            w.effectors[Mode.PRELOAD].fail = {"resize"}
            with pytest.raises(VgpuError, match="resize was told to fail"):
                await w.keeper.resize(held.id, ALICE, 40 * GIB, None)
            now = w.keeper.book.get(held.id)
            assert (now.state, now.slices) == (State.ACTIVE, held.slices)
            on_record = (await w.ledger.load()).allocations[0]
            assert (on_record.state, on_record.slices) == (State.ACTIVE, held.slices)
            w.effectors[Mode.PRELOAD].fail = set()
            assert (await w.keeper.resize(held.id, ALICE, 40 * GIB, None)).state is State.ACTIVE

    clock.run(work())


def test_a_resize_whose_end_was_not_recorded_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            with monkeypatch.context() as patched:
                patched.setattr(w.ledger, "commit", no_room)
                with pytest.raises(VgpuError, match="disk is full"):
                    await w.keeper.resize(held.id, ALICE, 40 * GIB, None)
            with pytest.raises(VgpuError, match="is resizing") as refused:
                await w.keeper.suspend(held.id, ALICE)
            assert f"vgpuctl resize {held.id}" in refused.value.hint
            again = await w.keeper.resize(held.id, ALICE, 40 * GIB, None)
            assert (again.state, again.slices[0].memory_bytes) == (State.ACTIVE, 40 * GIB)
            assert (await w.ledger.load()).allocations[0].state is State.ACTIVE

    clock.run(work())


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_a_tenant_runs_in_its_room_although_the_ledger_cannot_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A suspension is undone, and a resumption is not."""

    async def work() -> None:
        async with sleeping(tmp_path) as (w, driver, away):
            if verb == "suspend":
                await w.keeper.resume(away.id, OWNER)
            with monkeypatch.context() as patched:
                patched.setattr(w.ledger, "commit", no_room)
                with pytest.raises(VgpuError, match="disk is full"):
                    await getattr(w.keeper, verb)(away.id, OWNER)
            assert list(driver.states.values()) == [ProcessState.RUNNING]
            assert w.keeper.book.get(away.id).state is State.ACTIVE
            assert w.keeper.book.use_of(uuid(0)).memory_bytes == 4 * GIB
            await clock.passed(5)
            assert (await on_record(w)) == w.keeper.book.get(away.id)
            assert (await w.keeper.suspend(away.id, OWNER)).state is State.SUSPENDED

    clock.run(work())


def test_a_resumption_ends_a_suspension_that_could_not_be_undone(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, _, away):
            await w.keeper.resume(away.id, OWNER)
            w.effectors[Mode.PRELOAD].fail = {"resize"}
            with pytest.raises(VgpuError, match="resize was told to fail"):
                await w.keeper.suspend(away.id, OWNER)
            with pytest.raises(VgpuError, match="resize was told to fail"):
                await w.keeper.resume(away.id, OWNER)
            with pytest.raises(VgpuError, match="is suspending") as refused:
                await w.keeper.suspend(away.id, OWNER)
            assert f"vgpuctl resume {away.id}" in refused.value.hint
            w.effectors[Mode.PRELOAD].fail = set()
            assert (await w.keeper.resume(away.id, OWNER)).state is State.ACTIVE

    clock.run(work())


def test_a_resize_waits_for_a_change_that_is_not_recorded_yet(tmp_path: Path) -> None:
    """A pause, and the begin of a suspension: the state of the allocation is still active."""

    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            gate = asyncio.Event()

            async def pause() -> Allocation:
                await gate.wait()
                now = replace(held, paused=True)
                return await w.keeper.store.commit(now, Change.PAUSED, "paused")

            pausing = w.keeper.changes.begin(held.id, pause())
            resizing = asyncio.ensure_future(w.keeper.resize(held.id, ALICE, 8 * GIB, None))
            await clock.settled()
            assert w.keeper.book.get(held.id) == held
            gate.set()
            await pausing
            resized = await resizing
            assert (resized.paused, resized.slices[0].memory_bytes) == (True, 8 * GIB)
            assert w.keeper.book.get(held.id) == resized

    clock.run(work())


def test_a_release_waits_for_a_resize_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            gate = asyncio.Event()
            preload = w.effectors[Mode.PRELOAD]
            plain = preload.resize

            async def slow(allocation: object) -> None:
                await gate.wait()
                assert preload.attached, "resized what was detached already"
                await plain(allocation)  # type: ignore[arg-type]

            monkeypatch.setattr(preload, "resize", slow)
            resizing = asyncio.ensure_future(w.keeper.resize(held.id, ALICE, 8 * GIB, None))
            await clock.until(lambda: w.keeper.book.get(held.id).state is State.RESIZING)
            releasing = asyncio.ensure_future(w.keeper.release(held.id, ALICE, force=True))
            await clock.settled()
            gate.set()
            assert (await resizing).slices[0].memory_bytes == 8 * GIB
            assert await releasing is False
            assert w.is_empty()
            assert (await w.ledger.load()).allocations == ()

    clock.run(work())


def test_memory_that_a_failed_shrink_would_free_is_not_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path, one_device()) as w:
            held = await w.keeper.allocate(request("a", gib=80))
            gate = asyncio.Event()
            plain = w.ledger.intent

            async def fails(allocation: object, **_: object) -> None:
                if allocation.id != held.id:  # type: ignore[attr-defined]
                    return await plain(allocation)  # type: ignore[arg-type]
                await gate.wait()
                raise full()

            monkeypatch.setattr(w.ledger, "intent", fails)
            shrink = asyncio.ensure_future(w.keeper.resize(held.id, ALICE, 10 * GIB, None))
            await clock.until(lambda: w.keeper.book.get(held.id).state is State.RESIZING)
            with pytest.raises(VgpuError) as refused:
                await w.keeper.allocate(request("b", gib=60))
            assert refused.value.code is ErrorCode.NO_CAPACITY
            gate.set()
            with pytest.raises(VgpuError, match="disk is full"):
                await shrink
            assert w.parts.book.use_of(held.slices[0].device_uuid).memory_bytes == 80 * GIB

    clock.run(work())


# --- release


def test_concurrent_releases_of_one_allocation_run_once(tmp_path: Path) -> None:
    """The second release may finish its check for tenants after the first has removed the allocation."""

    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            preload = w.effectors[Mode.PRELOAD]
            gates = [asyncio.Event(), asyncio.Event()]
            waiting = iter(gates)

            async def tenants(*_: object) -> tuple[int, ...]:
                await next(waiting).wait()
                return ()

            preload.tenants = tenants  # type: ignore[method-assign,assignment]
            first = asyncio.ensure_future(w.keeper.release(held.id, ALICE, force=False))
            second = asyncio.ensure_future(w.keeper.release(held.id, ALICE, force=False))
            await clock.settled()
            gates[0].set()
            assert await first is False
            gates[1].set()
            assert await second is True

    clock.run(work())


def test_a_release_during_an_undo_waits_for_the_undo(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            preload = w.effectors[Mode.PRELOAD]
            preload.fail = {"attach"}
            preload.detach_gate = asyncio.Event()
            making = asyncio.ensure_future(w.keeper.allocate(request("r")))
            await clock.until(lambda: any(a.state is State.RELEASING for a in w.parts.book))
            (name,) = (a.id for a in w.parts.book)
            releasing = asyncio.ensure_future(w.keeper.release(name, ALICE, force=True))
            await clock.settled()
            preload.detach_gate.set()
            assert await releasing is False
            with pytest.raises(VgpuError, match="attach was told to fail"):
                await making
            assert preload.calls.count("detach") == 1
            assert w.is_empty()

    clock.run(work())


# --- failures of devices


async def two_on_one_device(w: World) -> tuple[str, str]:
    first = await w.keeper.allocate(request("a"))
    second = await w.keeper.allocate(request("b"))
    assert first.slices[0].device_uuid == second.slices[0].device_uuid
    return first.id, second.id


def test_a_release_while_a_device_fails_does_not_keep_its_other_allocations_from_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path, one_device()) as w:
            first, second = await two_on_one_device(w)
            uuid = w.keeper.book.get(first).slices[0].device_uuid
            plain = w.ledger.commit
            gate = asyncio.Event()

            async def slow(*words: object, **_: object) -> object:
                await gate.wait()
                return await plain(*words)  # type: ignore[arg-type]

            monkeypatch.setattr(w.ledger, "commit", slow)
            failing = asyncio.ensure_future(w.keeper.failures.mark_on(uuid, "device 0 is lost"))
            await clock.settled()
            await w.keeper.release(first, ALICE, force=True)
            gate.set()
            await failing
            assert first not in w.parts.book
            assert w.keeper.book.get(second).state is State.FAILED

    clock.run(work())


def test_recording_a_failure_late_does_not_cancel_a_release_that_began_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of the second allocation begins while vgpud records the failure of both."""

    async def work() -> None:
        async with world(tmp_path, one_device()) as w:
            first, second = await two_on_one_device(w)
            uuid = w.keeper.book.get(first).slices[0].device_uuid
            plain = w.ledger.commit
            gate = asyncio.Event()

            async def slow(*words: object, **_: object) -> object:
                await gate.wait()
                return await plain(*words)  # type: ignore[arg-type]

            monkeypatch.setattr(w.ledger, "commit", slow)
            failing = asyncio.ensure_future(w.keeper.failures.mark_on(uuid, "device 0 is lost"))
            await clock.settled()
            w.effectors[Mode.PRELOAD].fail = {"detach"}
            with pytest.raises(VgpuError, match="told to fail"):
                await w.keeper.release(second, ALICE, force=True)
            gate.set()
            await failing
            assert w.keeper.book.get(first).state is State.FAILED
            assert w.keeper.book.get(second).state is State.RELEASING
            states = {a.id: a.state for a in (await w.ledger.load()).allocations}
            assert states == {first: State.FAILED, second: State.RELEASING}

    clock.run(work())


def test_a_device_lost_during_an_allocation_fails_the_allocation(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path, one_device()) as w:
            w.effectors[Mode.PRELOAD].gate = asyncio.Event()
            making = asyncio.ensure_future(w.keeper.allocate(request("r")))
            await clock.until(lambda: any(w.parts.book))
            (device,) = w.gateway.node.devices
            w.gateway.node = Node(devices=(replace(device, health=Health.LOST),))
            await w.parts.inventory.refresh()
            await clock.settled()
            gate = w.effectors[Mode.PRELOAD].gate
            assert gate is not None
            gate.set()
            held = await making
            await clock.until(lambda: w.keeper.book.get(held.id).state is State.FAILED)

    clock.run(work())


def test_a_device_leaves_its_mode_after_the_allocation_that_kept_it_there_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new allocation keeps the device in its mode while the last other allocation is released. Then the
    intent of the new one cannot be recorded.
    """

    async def work() -> None:
        async with world(tmp_path, one_device()) as w:
            mps = w.effectors[Mode.MPS]
            ask: dict[str, Any] = {"isolation": Isolation.COMPUTE}
            last = await w.keeper.allocate(request("a", **ask))
            gate = asyncio.Event()
            plain = w.ledger.intent

            async def fails(allocation: Allocation, **_: object) -> None:
                if allocation.id == last.id:
                    return await plain(allocation)
                await gate.wait()
                raise full()

            monkeypatch.setattr(w.ledger, "intent", fails)
            newcomer = asyncio.ensure_future(w.keeper.allocate(request("b", **ask)))
            await clock.until(lambda: len(w.parts.book) == 2)
            await w.keeper.release(last.id, ALICE, force=False)
            assert mps.applied
            gate.set()
            with pytest.raises(VgpuError, match="disk is full"):
                await newcomer
            assert w.is_empty()

    clock.run(work())


# --- bound processes


NAMELESS = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe) Z'); print(flush=True); sys.stdin.read()"
)


def test_a_process_whose_name_has_any_bytes_can_be_read(tmp_path: Path) -> None:
    """A process may have a name of any bytes: PR_SET_NAME takes them, and /proc/PID/stat shows them
    (proc(5)).
    """
    tenant = subprocess.Popen([sys.executable, "-c", NAMELESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert tenant.stdout is not None
    tenant.stdout.readline()
    try:
        assert start_ticks(tenant.pid)
        assert not has_ended(tenant.pid)

        async def work() -> None:
            async with world(tmp_path) as w:
                held = await w.keeper.allocate(request("r", lifetime=of(tenant.pid)))
                await clock.settled()
                assert w.keeper.book.get(held.id).state is State.ACTIVE
                tenant.kill()
                await clock.until(w.is_empty)

        clock.run(work())
    finally:
        tenant.kill()
        tenant.communicate()


def test_a_lack_of_descriptors_is_not_reported_as_the_end_of_a_process() -> None:
    async def work() -> None:
        told: list[str] = []
        lifetimes = Lifetimes(told.append)
        sleeper = subprocess.Popen(["sleep", "60"])
        bound = of(sleeper.pid)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            lifetimes.watch("a", bound)
            await clock.settled()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert told == []
        sleeper.kill()
        await clock.until(lambda: told == ["a"])
        sleeper.wait()
        lifetimes.close()

    clock.run(work())


# --- start


def test_vgpud_starts_although_an_interrupted_resize_cannot_be_finished(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            await w.ledger.intent(replace(held, state=State.RESIZING))
        async with world(tmp_path) as w:
            state = await w.ledger.load()
            w.effectors[Mode.PRELOAD].fail = {"resize", "attach"}
            await recover(w.keeper, state, Start(ChildUnits(tmp_path), tmp_path, "boot"))
            assert w.keeper.book.get(held.id).state is State.RESIZING
            w.effectors[Mode.PRELOAD].fail = set()
            again = await w.keeper.resize(held.id, ALICE, 8 * GIB, None)
            assert (again.state, again.slices[0].memory_bytes) == (State.ACTIVE, 8 * GIB)
            await w.keeper.release(held.id, ALICE, force=False)
            assert w.is_empty()

    clock.run(work())


def test_a_start_waits_a_bounded_time_for_a_tenant_whose_memory_does_not_move(tmp_path: Path) -> None:
    async def work() -> None:
        async with sleeping(tmp_path) as (w, _, away):
            await w.ledger.intent(replace(away, state=State.RESUMING))
        driver = Driver({process.pid: ProcessState.SAVED for process in away.suspended}, gate=asyncio.Event())
        async with world(tmp_path, FakeGateway(NODE), cast(Suspender, driver)) as w:
            w.effectors[Mode.PRELOAD].applied.add(uuid(0))
            async with asyncio.timeout(60):
                await recover(w.keeper, await w.ledger.load(), Start(ChildUnits(tmp_path), tmp_path, "boot"))
            assert w.keeper.book.get(away.id).state is State.RESUMING
            assert (await w.keeper.allocate(request("other"))).state is State.ACTIVE
            assert driver.gate is not None
            driver.gate.set()
            await clock.until(lambda: w.keeper.book.get(away.id).state is State.ACTIVE)

    clock.run(work())


def test_a_stop_waits_a_bounded_time_for_a_tenant_whose_memory_does_not_move(tmp_path: Path) -> None:
    async def work() -> None:
        async with asyncio.timeout(60), sleeping(tmp_path) as (w, driver, away):
            driver.gate = asyncio.Event()
            resuming = asyncio.ensure_future(w.keeper.resume(away.id, OWNER))
            await clock.settled()
            await w.keeper.close()
            assert resuming.cancelled()
            assert (await on_record(w)).state is State.SUSPENDED

    clock.run(work())


def test_a_release_that_a_start_cannot_finish_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            await w.ledger.intent(replace(held, state=State.RELEASING))
        async with world(tmp_path) as w:
            state = await w.ledger.load()
            with monkeypatch.context() as patched:
                patched.setattr(w.ledger, "forget", no_room)
                await recover(w.keeper, state, Start(ChildUnits(tmp_path), tmp_path, "boot"))
                assert held.id in w.keeper.book
            await clock.passed(60)
            assert w.is_empty()

    clock.run(work())


def test_vgpud_starts_although_the_edits_of_an_allocation_cannot_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converged: list[bool] = []

    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            state = await w.ledger.load()

        async def stale() -> tuple[str, ...]:
            return (held.id,)

        async def converge() -> None:
            converged.append(True)

        mig: Any = SimpleNamespace(own_instances=frozenset, stale=stale, converge=converge)
        async with world(tmp_path) as w:
            monkeypatch.setattr(w.keeper, "mig", mig)
            w.effectors[Mode.PRELOAD].fail = {"attach"}
            await recover(w.keeper, state, Start(ChildUnits(tmp_path), tmp_path, "boot"))
            assert converged and held.id in w.keeper.book

    clock.run(work())


@needs("root", "fuse")
def test_a_user_that_locks_the_cdi_folder_in_the_kernel_delays_no_start_of_vgpud(tmp_path: Path) -> None:
    """A user keeps the folder of CDI specs locked. The start of vgpud cannot remove an orphaned spec there,
    and goes on.
    """

    async def work() -> None:
        (tmp_path / "cdi").mkdir()
        orphan = spec_path(tmp_path / "cdi", "deadbeef0000")
        orphan.write_text("{}")
        with locked_in_the_kernel(tmp_path / "cdi", tmp_path / "mount"):
            async with world(tmp_path) as w:
                w.parts.specs.patience_seconds = 0.2
                start = Start(ChildUnits(tmp_path), tmp_path, "boot")
                await recover(w.keeper, await w.ledger.load(), start)
                assert orphan.exists()

    asyncio.run(work())


def test_a_resize_leaves_a_failed_allocation_failed(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r"))
            await w.keeper.failures.mark(held.id, "device 0 is lost")
            with pytest.raises(VgpuError, match="has failed: device 0 is lost") as refused:
                await w.keeper.resize(held.id, ALICE, 8 * GIB, None)
            assert refused.value.code is ErrorCode.UNSUPPORTED
            assert w.keeper.book.get(held.id).state is State.FAILED

    clock.run(work())


# --- policy


def test_of_two_concurrent_reloads_the_later_policy_is_in_force(tmp_path: Path) -> None:
    """On a slow disk the first reload reads its files before the second one, and ends after it. The policy of
    the second reload is in force.
    """

    async def work() -> None:
        async with world(tmp_path) as w:
            older = policy_of(tmp_path, 'version = 1\n[[device]]\nmode = "mps"\n')()
            newer = policy_of(tmp_path, 'version = 1\n[[device]]\nmode = "preload"\n')()
            slow = clock.Gate()
            reads = iter((older, newer))

            def read() -> LoadedPolicy:
                mine = next(reads)
                if mine is older:
                    slow.wait()
                return mine

            w.keeper.policies.load = read
            first = asyncio.ensure_future(w.keeper.policies.reload(dry_run=False))
            await clock.settled()
            second = asyncio.ensure_future(w.keeper.policies.reload(dry_run=False))
            await clock.settled()
            slow.open()
            await asyncio.gather(first, second)
            assert w.keeper.policies.current is newer

    clock.run(work())


# --- CDI specs


def test_the_start_writes_no_cdi_spec_of_an_allocation_whose_release_has_begun(tmp_path: Path) -> None:
    """The two releases begin after the start has checked the first spec, and before it checks the second."""

    async def work() -> None:
        async with world(tmp_path) as w:
            held = [await w.keeper.allocate(request(name)) for name in "ab"]
            first, go_on = asyncio.Event(), asyncio.Event()

            class Slow(Specs):
                async def write(self, allocation: Allocation) -> Path:
                    path = await w.parts.specs.write(allocation)
                    first.set()
                    await go_on.wait()
                    return path

            slow = Slow(w.parts.specs.folder)
            w.keeper.context = replace(w.parts, specs=slow, host_root=tmp_path)
            watch = asyncio.ensure_future(CdiWatch(w.keeper).run())
            await first.wait()
            gate = w.effectors[Mode.PRELOAD].detach_gate = asyncio.Event()
            releases = [asyncio.ensure_future(w.keeper.release(a.id, ALICE, force=False)) for a in held]
            await clock.until(lambda: w.specs() == [])
            go_on.set()
            await clock.settled()
            watch.cancel()
            assert w.specs() == []
            gate.set()
            await asyncio.gather(*releases)
            assert w.is_empty()

    clock.run(work())

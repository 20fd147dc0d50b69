"""The audit trail: each change leaves one line with its cause, whichever interface it comes by."""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.test_lifetimes import of
from tests.node.world import ALICE, BOB, World, request, world
from vgpud import audit
from vgpud.daemon import reload_once
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import Lifetime, Mode
from vgpud.node.containers import Containers
from vgpud.node.recover import Start, carry_out
from vgpud.planner.reconcile import Action, ActionKind

ASKER = Caller(Door.TENANT, 1000, 1000, Lifetime(77, 1))


def trail(tmp_path: Path, scene: Callable[[World], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
    """Plays a scene and returns its audit lines. Asserts that no other log line says the same."""

    async def work() -> None:
        async with world(tmp_path) as w:
            await scene(w)

    with capture_logs() as lines:
        clock.run(work())
    assert {line["event"] for line in lines if "audit" not in line} <= {"compute_engine_probed"}
    return [dict(line) for line in lines if "audit" in line]


def told(line: dict[str, Any], *keys: str) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in keys)


def test_the_audit_line_of_a_change_names_its_caller_door_and_owner(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(ASKER)
        held = await w.keeper.allocate(request("r"))
        await w.keeper.resize(held.id, ASKER, 2**30, None)
        await w.keeper.release(held.id, ASKER, force=False)

    lines = trail(tmp_path, scene)
    assert [told(line, "audit", "event", "outcome") for line in lines] == [
        ("allocate", "allocated", "done"),
        ("resize", "resized", "done"),
        ("release", "released", "done"),
    ]
    assert {told(line, "door", "uid", "pid", "owner") for line in lines} == {("tenant", 1000, 77, 1000)}
    assert len({line["allocation"] for line in lines}) == 1


def test_a_refused_change_leaves_an_audit_line(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(ASKER)
        held = await w.keeper.allocate(request("r"))
        audit.asked_by(BOB)
        for work in (
            w.keeper.release(held.id, BOB, force=True),
            w.keeper.suspend(held.id, BOB),
            w.keeper.allocate(replace(request("big"), memory_bytes=2**60)),
        ):
            with pytest.raises(VgpuError):
                await work

    lines = trail(tmp_path, scene)[1:]
    assert [told(line, "audit", "outcome", "uid", "owner") for line in lines] == [
        ("release", "NOT_OWNER", 1001, 1000),
        ("suspend", "NOT_OWNER", 1001, 1000),
        ("allocate", "BAD_QUANTITY", 1001, 1000),
    ]


def test_repetitions_of_a_request_are_counted_and_leave_no_audit_line(tmp_path: Path) -> None:
    """A tenant repeats one request. A line for each repetition would make the journal drop other lines."""
    counted: list[Any] = []

    async def scene(w: World) -> None:
        audit.asked_by(ALICE)
        await asyncio.gather(*(w.keeper.allocate(request("r")) for _ in range(50)))
        held = await w.keeper.allocate(request("r"))
        with capture_logs() as lines:
            await w.keeper.release(held.id, ALICE, force=False)
        counted.extend(line.get("repeats") for line in lines if line["event"] == "released")

    assert [line["audit"] for line in trail(tmp_path, scene)] == ["allocate"]
    assert counted == [50]


def test_repeats_of_a_refused_request_are_not_counted_as_repeats_of_a_later_allocation(
    tmp_path: Path,
) -> None:
    counted: list[Any] = []

    async def scene(w: World) -> None:
        audit.asked_by(ALICE)
        too_large = (w.keeper.allocate(request("r", memory_bytes=2**60)) for _ in range(5))
        assert all(
            isinstance(one, VgpuError) for one in await asyncio.gather(*too_large, return_exceptions=True)
        )
        held = await w.keeper.allocate(request("r"))
        with capture_logs() as lines:
            await w.keeper.release(held.id, ALICE, force=False)
        counted.extend(line.get("repeats") for line in lines if line["event"] == "released")

    trail(tmp_path, scene)
    assert counted == [None]


def test_the_audit_line_of_an_automatic_release_names_its_reason(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(ASKER)
        with subprocess.Popen(["sleep", "1000"]) as sleeper:
            held = await w.keeper.allocate(request("r", lifetime=of(sleeper.pid)))
            sleeper.kill()
        await clock.until(lambda: held.id not in w.parts.book)
        await clock.settled()

    line = trail(tmp_path, scene)[-1]
    assert told(line, "audit", "door", "reason") == (
        "release",
        "vgpud",
        "the process that it is bound to ended",
    )


def test_the_audit_trail_tells_a_reload_by_signal_from_a_requested_reload(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.by_itself("SIGHUP")
        await reload_once(w.keeper)
        audit.asked_by(replace(ASKER, door=Door.ADMIN))
        await w.keeper.policies.reload(dry_run=False)
        await w.keeper.policies.reload(dry_run=True)

    lines = trail(tmp_path, scene)
    assert [told(line, "audit", "door", "reason") for line in lines] == [
        ("reload policy", "vgpud", "SIGHUP"),
        ("reload policy", "admin", None),
    ]


def test_the_audit_lines_of_prepare_bind_and_end_name_the_container(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        containers = Containers(w.keeper)
        audit.asked_by(ASKER, "runtime", container="c1")
        held = await containers.start(request("r", lifetime=Lifetime(1, 5)))
        with pytest.raises(VgpuError, match="was there before"):
            await containers.bind(held.id, ASKER, Lifetime(2, 4))
        with pytest.raises(VgpuError):
            containers.end(held.id, BOB)

    lines = trail(tmp_path, scene)
    assert [told(line, "audit", "outcome") for line in lines] == [
        ("allocate", "done"),
        ("bind", "BAD_REQUEST"),
        ("end", "NOT_OWNER"),
    ]
    assert {told(line, "door", "container", "uid", "pid") for line in lines} == {("runtime", "c1", 1000, 77)}


def test_allocations_on_a_lost_device_fail_with_the_loss_as_reason(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(ASKER)
        held = await w.keeper.allocate(request("r"))
        await w.keeper.failures.mark(held.id, "device 0 is lost")

    assert told(trail(tmp_path, scene)[-1], "audit", "log_level", "door", "reason", "owner") == (
        "fail",
        "warning",
        "vgpud",
        "device 0 is lost",
        1000,
    )


def test_a_drain_leaves_one_audit_line(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(replace(ASKER, door=Door.ADMIN))
        for _ in range(2):
            await w.keeper.operations.drain("GPU-00000000", True)

    assert [told(line, "audit", "device") for line in trail(tmp_path, scene)] == [("drain", "GPU-00000000")]


def test_a_notice_that_the_audit_trail_already_has_leaves_no_second_log_line(tmp_path: Path) -> None:
    async def scene(w: World) -> None:
        with capture_logs() as lines:
            w.keeper.notices.notice("GPU-00000000", "MPS is back", audited=True)
            w.keeper.notices.notice("GPU-00000000", "MPS is silent")
        assert [line["why"] for line in lines] == ["MPS is silent"]
        await clock.until(lambda: len(w.keeper.store.latest(2)) == 2)

    assert trail(tmp_path, scene) == []


@pytest.mark.parametrize("kind", ActionKind)
def test_each_automatic_action_at_the_start_leaves_one_audit_line_with_its_reason(
    tmp_path: Path, kind: ActionKind
) -> None:
    async def scene(w: World) -> None:
        audit.asked_by(ASKER)
        held = await w.keeper.allocate(request("r"))
        of_device = kind in (ActionKind.STOP_MPS, ActionKind.REMOVE_INSTANCE)
        action = Action(kind, "GPU-00000001" if of_device else held.id, "it was left behind")
        start = Start(cast(Any, None), tmp_path, "")
        (tmp_path / "leases").mkdir()
        await carry_out(w.keeper, start, action)
        while kind is ActionKind.RELEASE and held.id in w.parts.book:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    line = told_of_start(trail(tmp_path, scene))
    assert (line["door"], line["outcome"]) == ("vgpud", "done")
    assert "left behind" in line["reason"] or kind is ActionKind.RELEASE


def told_of_start(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The audit line that vgpud writes at its start. It is the second one; the first is that of the
    allocation.
    """
    (_, line) = lines
    return line


def test_repeated_end_messages_of_a_container_start_only_one_task(tmp_path: Path) -> None:
    """The processes of the container still run when the end message is repeated."""

    async def scene(w: World) -> None:
        containers = Containers(w.keeper)
        held = await containers.start(request("r"))
        w.effectors[Mode.PRELOAD].pids = (7,)
        before = len(asyncio.all_tasks())
        for _ in range(50):
            containers.end(held.id, ALICE)
        assert len(asyncio.all_tasks()) == before + 1

    assert [line["audit"] for line in trail(tmp_path, scene)] == ["allocate", "end"]

"""The limits in the lease of a preload allocation, from its request and the policy, and the watch of the
arbiter.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests import clock
from tests.node.world import device
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Mode, Owner, Request, Slice, State
from vgpud.modes.preload import ARBITER_UNIT, Preload, PreloadRules, limits_of
from vgpud.proc import Running
from vgpud.units import UnitSpec

QUARTER = Percent(2500)
RULES = {
    "GPU-hard": PreloadRules(),
    "GPU-lent": PreloadRules(SharePolicy.WORK_CONSERVING),
}


def held(priority: str = "", share: Percent | None = QUARTER) -> Allocation:
    slices = tuple(Slice(uuid, Mode.PRELOAD, GIB, share) for uuid in RULES)
    return Allocation("a", Request("r", Owner(0, 0), priority=priority), State.ACTIVE, slices)


def test_each_device_has_the_share_policy_of_its_own_rule() -> None:
    hard, lent = limits_of(held(), RULES.__getitem__)
    assert (hard.share_policy, lent.share_policy) == (SharePolicy.HARD, SharePolicy.WORK_CONSERVING)
    assert (hard.share_hundredths, lent.share_hundredths) == (2500, 2500)


def test_a_tenant_without_a_share_has_no_share_policy() -> None:
    for limits in limits_of(held(share=None), RULES.__getitem__):
        assert (limits.share_policy, limits.share_hundredths) == (SharePolicy.NONE, 10000)


@pytest.mark.parametrize(
    ("priority", "in_lease"), [("", 0), ("normal", 0), ("above-normal", 1), ("below-normal", -1)]
)
def test_a_higher_priority_is_a_higher_number_in_the_lease(priority: str, in_lease: int) -> None:
    assert [limits.priority for limits in limits_of(held(priority), RULES.__getitem__)] == [in_lease] * 2


def test_the_lease_of_an_mps_tenant_has_no_share_and_no_priority() -> None:
    allocation = held("below-normal")
    mps = replace(allocation, slices=tuple(replace(part, mode=Mode.MPS) for part in allocation.slices))
    for limits in limits_of(mps, RULES.__getitem__):
        assert (limits.share_policy, limits.share_hundredths) == (SharePolicy.NONE, 10000)
        assert limits.priority == 0


class Watched:
    """Units whose arbiter runs. `stopped` lists the units that were stopped."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def running(self, name: str) -> Running | None:
        return Running(name, 1, 1)

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None

    def stop(self, name: str, grace_seconds: float) -> None:
        self.stopped.append(name)


def test_a_listing_of_tenants_waits_only_once_for_an_arbiter_that_hangs(tmp_path: Path) -> None:
    units: Any = Watched()
    paths: Any = SimpleNamespace(run_dir=tmp_path, leases=tmp_path / "leases")
    none: Any = None
    part = held().slices[0]

    async def ask(preload: Preload) -> None:
        with pytest.raises(VgpuError) as silence:
            await preload.tenants(held(), part, soon=True)
        assert silence.value.code is ErrorCode.HELPER_TIMEOUT

    async def hang() -> None:
        preload = Preload(units, paths, none, none, answer_seconds=0.01, silence_seconds=0.01)
        await preload.ensure_arbiter()
        assert preload.trouble() == ""
        await ask(preload)
        assert "vgpu-arbiter does not answer" in preload.trouble()
        silent.close()  # without a process that listens, an order fails with another error
        await ask(preload)

    (tmp_path / "arbiter").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "arbiter" / "control.sock"))
        silent.listen()
        clock.run(hang())


def test_an_arbiter_that_hangs_is_reported_and_then_killed(tmp_path: Path) -> None:
    units: Any = Watched()
    paths: Any = SimpleNamespace(run_dir=tmp_path, leases=tmp_path / "leases")
    none: Any = None
    notices: list[str] = []
    world: Any = SimpleNamespace(notice=notices.append)

    async def hang() -> None:
        preload = Preload(units, paths, world, none, answer_seconds=0.01)
        await preload.ensure_arbiter()
        watch = asyncio.ensure_future(preload.watch())
        await clock.passed(1)
        assert "vgpu-arbiter does not answer" in preload.trouble()
        assert units.stopped == []
        await clock.passed(9)
        watch.cancel()
        assert units.stopped == [ARBITER_UNIT]
        assert notices == ["vgpu-arbiter did not answer for 6 s: vgpud ends it"]

    (tmp_path / "arbiter").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "arbiter" / "control.sock"))
        silent.listen()
        clock.run(hang())


class Ending(Watched):
    """Units whose arbiter ends when the test calls `end`."""

    end: Callable[[str], None]

    def on_exit(self, name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        self.end = callback
        return super().on_exit(name, callback)


def answer(arbiter: socket.socket, kind: int | None) -> None:
    """Answers all orders until the test shuts the socket down. A client may have left by then."""
    done = b"" if kind is None else struct.pack("<I", kind).ljust(layout.MESSAGE_SIZE, b"\0")
    with suppress(OSError):
        while True:
            with arbiter.accept()[0] as line, suppress(OSError):
                line.recv(layout.MESSAGE_SIZE)
                if done:
                    line.send(done)


@contextmanager
def arbiter_in(run_dir: Path, kind: int | None) -> Iterator[None]:
    """An arbiter that answers every order with a message of this kind; None: it closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as arbiter:
        arbiter.bind(str(run_dir / "arbiter" / "control.sock"))
        arbiter.listen()
        thread = threading.Thread(target=answer, args=(arbiter, kind))
        thread.start()
        try:
            yield
        finally:
            arbiter.shutdown(socket.SHUT_RDWR)
            thread.join()


def watched(run_dir: Path) -> tuple[Ending, Preload]:
    units: Any = Ending()
    paths: Any = SimpleNamespace(run_dir=run_dir, leases=run_dir / "leases")
    none: Any = None
    (run_dir / "arbiter").mkdir()
    paths.leases.mkdir()
    return units, Preload(units, paths, none, none)


def test_an_order_to_a_killed_arbiter_waits_for_the_notice_of_its_end(tmp_path: Path) -> None:
    """A killed process closes its sockets first and ends later."""
    units, preload = watched(tmp_path)

    async def order() -> None:
        await preload.ensure_arbiter()
        ordered = asyncio.ensure_future(preload.serve_anew(["a"]))
        await clock.passed(1)
        assert not ordered.done()
        with arbiter_in(tmp_path, layout.MSG_OK):
            units.end(ARBITER_UNIT)
            await ordered

    clock.run(order())


def test_an_order_that_is_lost_twice_fails_with_the_arbiters_error(tmp_path: Path) -> None:
    """The arbiter dies before it answers, and so does the next one."""
    units, preload = watched(tmp_path)

    async def order() -> None:
        await preload.ensure_arbiter()
        with arbiter_in(tmp_path, None):
            ordered = asyncio.ensure_future(preload.serve_anew(["a"]))
            await clock.passed(1)
            assert not ordered.done()
            units.end(ARBITER_UNIT)
            with pytest.raises(VgpuError, match="vgpu-arbiter cannot be reached") as lost:
                await ordered
        assert lost.value.code is ErrorCode.HELPER_FAILED

    clock.run(order())


def test_an_arbiter_that_lives_refuses_an_order_without_a_wait(tmp_path: Path) -> None:
    _, preload = watched(tmp_path)

    async def order() -> None:
        await preload.ensure_arbiter()
        began = asyncio.get_running_loop().time()
        with arbiter_in(tmp_path, layout.MSG_ERROR), pytest.raises(VgpuError) as refusal:
            await preload.serve_anew(["a"])
        assert refusal.value.code is ErrorCode.HELPER_FAILED
        assert asyncio.get_running_loop().time() - began < 1

    clock.run(order())


def test_listings_wait_only_once_for_an_arbiter_that_cannot_be_reached(tmp_path: Path) -> None:
    _, preload = watched(tmp_path)

    async def ask() -> None:
        await preload.ensure_arbiter()
        began = asyncio.get_running_loop().time()
        for code in (ErrorCode.HELPER_FAILED, ErrorCode.HELPER_TIMEOUT, ErrorCode.HELPER_TIMEOUT):
            with pytest.raises(VgpuError) as silence:
                await preload.tenants(held(), held().slices[0], soon=True)
            assert silence.value.code is code
        assert asyncio.get_running_loop().time() - began < 2

    clock.run(ask())


class Refusing(Watched):
    """Units whose arbiter starts at the third attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def running(self, name: str) -> Running | None:
        return super().running(name) if self.attempts == 3 else None

    def start(self, spec: UnitSpec) -> None:
        self.attempts += 1
        if self.attempts < 3:
            raise VgpuError(ErrorCode.HELPER_FAILED, "told to fail", "")


def test_vgpud_starts_without_an_arbiter_that_does_not_start_and_tries_again(tmp_path: Path) -> None:
    units: Any = Refusing()
    paths: Any = SimpleNamespace(run_dir=tmp_path, leases=tmp_path / "leases", arbiter=tmp_path / "none")
    world: Any = SimpleNamespace(allocations=tuple, notice=lambda sentence: None)
    none: Any = None

    async def start() -> None:
        preload = Preload(units, paths, world, none)
        for index, part in enumerate(held().slices):
            await preload.resume(device(index), part)
        assert units.attempts == 1
        await clock.until(lambda: units.attempts == 3)

    (tmp_path / "leases" / "a").mkdir(parents=True)
    clock.run(start())


def test_a_lease_or_a_memory_wall_that_fails_keeps_no_other_tenant_from_the_present_rules(
    tmp_path: Path,
) -> None:
    """Neither a reload of the policy nor a start of vgpud may end at the first tenant that cannot follow."""
    tenants = (held(), replace(held(), id="b"))
    paths: Any = SimpleNamespace(run_dir=tmp_path, leases=tmp_path / "leases", libvgpu=tmp_path / "none")
    world: Any = SimpleNamespace(allocations=lambda: tenants, notice=lambda sentence: None)
    units: Any = Watched()

    async def refuses(_: Allocation) -> None:
        raise VgpuError(ErrorCode.NVML_FAILED, "the driver is busy", "")

    walls: Any = SimpleNamespace(keep=refuses)
    preload = Preload(units, paths, world, walls)
    for tenant in tenants:
        (tmp_path / "leases" / tenant.id).mkdir(parents=True)
    with capture_logs() as lines:
        clock.run(preload.resume(replace(device(0), uuid="GPU-hard"), held().slices[0]))
    logged = [(line["event"], line["allocation"]) for line in lines if "allocation" in line]
    assert logged == [
        ("policy_rules_not_applied_to_tenant", "a"),
        ("policy_rules_not_applied_to_tenant", "b"),
        ("cgroup_device_memory_limit_not_adjusted", "a"),
        ("cgroup_device_memory_limit_not_adjusted", "b"),
    ]


def test_a_device_needs_libvgpu_and_the_arbiter_for_preload(tmp_path: Path) -> None:
    paths: Any = SimpleNamespace(
        run_dir=tmp_path, leases=tmp_path, libvgpu=tmp_path / "lib", arbiter=tmp_path / "arbiter"
    )
    none: Any = None
    preload = Preload(none, paths, none, none)
    for name in ("lib", "arbiter"):
        said = asyncio.run(preload.verify(device(0)))
        assert said == f"{tmp_path / name} is missing, so preload limits cannot be enforced"
        (tmp_path / name).touch()
    assert asyncio.run(preload.verify(device(0))) is None

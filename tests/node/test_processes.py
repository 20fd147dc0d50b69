"""The listing of a device's processes: their allocations, and which processes are past their limits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import clock
from tests.node.world import FakeGateway, device, request, world
from vgpud.model.device import DeviceProcess, Node
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode
from vgpud.node.view.processes import Processes

STRAY = DeviceProcess(4242, GIB, "compute")


@pytest.mark.parametrize(
    ("is_marked", "is_silent", "is_past"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_process_that_libvgpu_does_not_count_is_listed_as_past_its_limits_if_its_tenant_is_marked(
    tmp_path: Path, is_marked: bool, is_silent: bool, is_past: bool
) -> None:
    """If the arbiter does not answer, vgpud does not know which processes libvgpu counts, and lists none as
    past its limits.
    """

    async def work() -> None:
        async with world(tmp_path, FakeGateway(Node((replace(device(0), processes=(STRAY,)),)))) as w:
            held = await w.keeper.allocate(request("r1"))
            if is_silent:
                w.effectors[Mode.PRELOAD].fail.add("tenants")
            processes = Processes(
                w.parts.book,
                w.parts.inventory,
                w.parts.effectors,
                lambda _, pids: dict.fromkeys(pids, held.id),
                lambda _: is_marked,
            )
            (found,) = await processes.listed(await w.keeper.meters.read())
            assert (found.pid, found.allocation_id, found.limited) == (4242, held.id, not is_past)

    clock.run(work())


@pytest.mark.parametrize(("is_silent", "mode"), [(True, "preload"), (False, "")])
def test_a_process_of_unknown_allocation_is_listed_with_the_mode_that_did_not_answer(
    tmp_path: Path, is_silent: bool, mode: str
) -> None:
    async def work() -> None:
        async with world(tmp_path, FakeGateway(Node((replace(device(0), processes=(STRAY,)),)))) as w:
            await w.keeper.allocate(request("r1"))
            if is_silent:
                w.effectors[Mode.PRELOAD].fail.add("tenants")
            processes = Processes(
                w.parts.book, w.parts.inventory, w.parts.effectors, lambda *_: {}, lambda _: True
            )
            (found,) = await processes.listed(await w.keeper.meters.read())
            assert (found.allocation_id, found.silent_mode) == ("", mode)

    clock.run(work())

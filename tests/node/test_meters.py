"""Meters for everybody who looks: shared, and never stopped by hardware that hangs."""

import asyncio
import time
from pathlib import Path

from tests.node.world import FakeGateway, request, world
from vgpud.model.device import Node
from vgpud.model.tenancy import Mode
from vgpud.model.view import Vitals


def test_many_who_look_share_one_look(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r1"))
            seen = await asyncio.gather(*(w.keeper.metered() for _ in range(20)))
            assert w.effectors[Mode.PRELOAD].calls.count("meters") == 1
            assert {id(one) for one in seen} == {id(seen[0])}
            assert list(seen[0].meters) == [held.id]
            await w.keeper.meters.read(0.0)
            assert w.effectors[Mode.PRELOAD].calls.count("meters") == 2

    asyncio.run(work())


def test_a_slice_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.keeper.allocate(request("r1"))
            w.effectors[Mode.PRELOAD].fail.add("meters")
            assert dict((await w.keeper.metered()).meters) == {}

    asyncio.run(work())


class Slow(FakeGateway):
    """NVML that takes its time."""

    seconds = 0.0

    def snapshot(self) -> Node:
        time.sleep(self.seconds)
        return super().snapshot()

    def vitals(self, uuid: str) -> Vitals:
        time.sleep(self.seconds)
        return Vitals(temperature_celsius=40)


def test_hardware_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        gateway = Slow()
        async with world(tmp_path, gateway) as w:
            held = await w.keeper.allocate(request("r1"))
            gateway.seconds = 1.5
            began = time.monotonic()
            for _ in range(2):
                seen = await w.keeper.meters.read(0.0)
                assert list(seen.meters) == [held.id]
                assert dict(seen.vitals) == {}
            # four looks at the hardware, of half a second at most; waiting would take nine
            assert time.monotonic() - began < 6
            gateway.seconds = 0.0
            await asyncio.sleep(3.2)
            await w.keeper.meters.read(0.0)
            assert (await w.keeper.meters.read(0.0)).vitals

    asyncio.run(work())

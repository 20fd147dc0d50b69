"""The meters of allocations: callers share one reading, and hanging hardware does not block them."""

import asyncio
from pathlib import Path

import pytest

from tests import clock
from tests.node.world import FakeGateway, request, world
from vgpud.model.device import Node
from vgpud.model.tenancy import Mode
from vgpud.model.view import Vitals


def test_concurrent_readers_of_the_meters_share_a_reading(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            held = await w.keeper.allocate(request("r1"))
            seen = await asyncio.gather(*(w.keeper.meters.read() for _ in range(20)))
            assert w.effectors[Mode.PRELOAD].calls.count("meters") == 1
            assert {id(one) for one in seen} == {id(seen[0])}
            assert list(seen[0].meters) == [held.id]
            await clock.passed(1)
            await w.keeper.meters.read()
            assert w.effectors[Mode.PRELOAD].calls.count("meters") == 2

    clock.run(work())


def test_an_allocation_whose_meters_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.keeper.allocate(request("r1"))
            w.effectors[Mode.PRELOAD].fail.add("meters")
            assert dict((await w.keeper.meters.read()).meters) == {}

    clock.run(work())


class Hanging(FakeGateway):
    """NVML whose calls wait at `gate`, if it is set."""

    gate: clock.Gate | None = None

    def snapshot(self) -> Node:
        if self.gate is not None:
            self.gate.wait()
        return super().snapshot()

    def vitals(self, uuid: str) -> Vitals:
        if self.gate is not None:
            self.gate.wait()
        return Vitals(temperature_celsius=40)


def test_a_reading_waits_half_a_second_each_for_snapshot_and_sensors_of_hung_hardware(tmp_path: Path) -> None:
    async def work() -> None:
        gateway = Hanging()
        async with world(tmp_path, gateway) as w:
            held = await w.keeper.allocate(request("r1"))
            gateway.gate = clock.Gate()
            now = asyncio.get_running_loop().time
            for _ in range(2):
                await clock.passed(10)  # after 10 s the previous reading is too old
                began = now()
                seen = await w.keeper.meters.read()
                # two time limits have passed: the one for the snapshot and the one for the sensors
                assert now() - began == pytest.approx(2 * 0.5)
                assert list(seen.meters) == [held.id]
                assert dict(seen.vitals) == {}
            gateway.gate.open()
            await clock.passed(10)
            assert (await w.keeper.meters.read()).vitals

    clock.run(work())

"""Snapshots of the devices: callers share one, and an older snapshot never replaces a newer one."""

import asyncio
import itertools

from tests import clock
from tests.node.world import FakeGateway, device, inventory_of
from vgpud.model.device import Node


class Numbered(FakeGateway):
    """A gateway that numbers its snapshots in the order in which they begin. A snapshot whose number has a
    gate waits there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = itertools.count(1)
        self.gates: dict[int, clock.Gate] = {}
        self.at_once = 0
        self.most_at_once = 0

    def snapshot(self) -> Node:
        number = next(self.begun)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if number in self.gates:
            self.gates[number].wait()
        self.at_once -= 1
        return Node(driver_version=str(number))


def test_callers_that_ask_during_a_snapshot_share_the_next_one() -> None:
    async def work() -> None:
        gateway = Numbered()
        gateway.gates = {1: clock.Gate(), 2: clock.Gate()}
        inventory = inventory_of(gateway)
        first = asyncio.ensure_future(inventory.refresh())
        await clock.settled()
        rest = [asyncio.ensure_future(inventory.refresh()) for _ in range(8)]
        await clock.settled()
        gateway.gates[1].open()
        await first
        await clock.settled()
        assert not any(task.done() for task in rest), "the first one began before they asked"
        gateway.gates[2].open()
        await asyncio.gather(*rest)
        assert gateway.most_at_once == 1
        assert inventory.node.driver_version == "2"

    clock.run(work())


def test_a_refresh_requested_at_the_end_of_a_snapshot_takes_a_new_snapshot() -> None:
    async def work() -> None:
        gateway = FakeGateway(Node(devices=(device(0),)))
        inventory = inventory_of(gateway)
        came_back = asyncio.get_running_loop().create_future()
        inventory.came_back = lambda: came_back.set_result(None)

        async def change() -> None:
            await came_back
            gateway.node = Node(devices=(device(0), device(1)))
            await inventory.refresh()

        changed = asyncio.ensure_future(change())
        await inventory.refresh()
        await changed
        assert len(inventory.node.devices) == 2

    clock.run(work())

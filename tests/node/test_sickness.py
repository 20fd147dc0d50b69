"""vgpud checks a sick device again until it is well, without a call of a client."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tests import clock
from vgpud.model.caller import Caller
from vgpud.model.device import Device, Health, Node
from vgpud.model.move_view import Evacuation
from vgpud.node.tenants.sickness import LOOK_SECONDS, Sickness


class Card:
    """An inventory with one sick device, which is well from refresh `well_at` on. `emptied` counts the
    attempts to move its tenants, none of which succeeds.
    """

    def __init__(self, well_at: int) -> None:
        self.node = Node((Device("GPU-0", 0, health=Health.SICK, ailment="NVML asks for a reset"),))
        self.looks = 0
        self.emptied = 0
        self.told: list[str] = []
        self._well_at = well_at

    async def refresh(self) -> None:
        self.looks += 1
        if self.looks == self._well_at:
            self.node = replace(self.node, devices=(replace(self.node.devices[0], health=Health.OK),))

    def tell(self, device_uuid: str, sentence: str) -> None:
        self.told.append(sentence)

    async def evacuate(self, device_uuid: str, caller: Caller) -> Evacuation:
        assert (device_uuid, caller.is_admin) == ("GPU-0", True)
        self.emptied += 1
        return Evacuation(staying=(("a", "there is no room"),))


def tended(card: Card, rule: str) -> float:
    """Returns the simulated seconds until two concurrent calls about the device have returned."""
    policy = SimpleNamespace(rule_for=lambda _: SimpleNamespace(on_sick=rule))
    notices = SimpleNamespace(notice=card.tell)
    context = SimpleNamespace(inventory=card, notices=notices, policy=lambda: policy)
    sickness = Sickness(cast(Any, context), cast(Any, card), cast(Any, None), tuple)

    async def scene() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(sickness.tend("GPU-0"), sickness.tend("GPU-0"))
        return asyncio.get_running_loop().time() - began

    return clock.run(scene())


def test_a_sick_device_is_checked_again_until_it_is_well() -> None:
    card = Card(well_at=3)
    assert tended(card, "drain") == 3 * LOOK_SECONDS
    assert (card.looks, card.emptied) == (3, 0)


def test_a_failed_move_off_a_sick_device_is_retried_at_each_check() -> None:
    card = Card(well_at=2)
    tended(card, "move")
    assert card.emptied == 2
    assert card.told == ["it is sick, and allocation a stays: there is no room"]

"""Slices that divide a MIG instance: attach makes the instance first and then the slice, detach reverses it.

Several slices share an instance, which is made for the first and destroyed with the last. So attach and
detach on one instance never run concurrently.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from vgpud.model.device import Device, PlaceKey
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.modes.base import Effector
from vgpud.node.store.allocations import AllocationStore

_Place = tuple[str, PlaceKey, PlaceKey | None]


class Stack:
    def __init__(self, store: AllocationStore, effectors: Mapping[Mode, Effector]) -> None:
        self._store = store
        self._effectors = effectors
        self._locks: dict[_Place, asyncio.Lock] = {}

    def _lock(self, part: Slice) -> asyncio.Lock:
        return self._locks.setdefault(_place(part), asyncio.Lock())

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        """As Effector.attach. Books the slice's MIG device before the second mode attaches."""
        async with self._lock(part):
            on, _ = await self._effectors[Mode.MIG].attach(allocation, part, device)
            known = replace(allocation, slices=tuple(on if s is part else s for s in allocation.slices))
            self._store.amend(known)
            return await self._effectors[part.mode].attach(known, on, device)

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        async with self._lock(part):
            await self._effectors[part.mode].detach(allocation, part)
            staying = self._store.book.slices_on(part.device_uuid)
            if not any(_place(other) == _place(part) for other in staying):
                await self._effectors[Mode.MIG].detach(allocation, part)


def _place(part: Slice) -> _Place:
    """The place of the instance. Not its id, which changes when the instance is made anew."""
    assert part.mig is not None
    return part.device_uuid, *part.mig.place

"""Slices on top of MIG instances: the instance first, then what divides it; and back in reverse.

Several slices share an instance. It is made for the first of them and goes with the last, so that
coming and going on one instance is done one after the other.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from vgpud.model.device import Device, PlaceKey
from vgpud.model.tenancy import Allocation, Edits, Mode, Slice
from vgpud.modes.base import Effector
from vgpud.node.book import Book

_Place = tuple[str, PlaceKey, PlaceKey | None]


class Stack:
    def __init__(self, book: Book, effectors: Mapping[Mode, Effector]) -> None:
        self._book = book
        self._effectors = effectors
        self._locks: dict[_Place, asyncio.Lock] = {}

    def _lock(self, part: Slice) -> asyncio.Lock:
        return self._locks.setdefault(_place(part), asyncio.Lock())

    async def attach(self, allocation: Allocation, part: Slice, device: Device) -> tuple[Slice, Edits]:
        """As Effector.attach; the book knows the slice's MIG device before the second mode is asked."""
        async with self._lock(part):
            on, _ = await self._effectors[Mode.MIG].attach(allocation, part, device)
            known = replace(allocation, slices=tuple(on if s is part else s for s in allocation.slices))
            self._book.replace(known)
            return await self._effectors[part.mode].attach(known, on, device)

    async def detach(self, allocation: Allocation, part: Slice) -> None:
        async with self._lock(part):
            await self._effectors[part.mode].detach(allocation, part)
            staying = self._book.slices_on(part.device_uuid)
            if not any(_place(other) == _place(part) for other in staying):
                await self._effectors[Mode.MIG].detach(allocation, part)


def _place(part: Slice) -> _Place:
    """Not by ids: an instance's change."""
    assert part.mig is not None
    return part.device_uuid, *part.mig.place

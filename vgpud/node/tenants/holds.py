"""The resources that moves share, and those that one move holds.

Moves of several tenants overlap. A move by the host first reserves the link from the old device to the host,
then the driver (a session of vgpu-suspend), and frees the link when it has the driver. A move frees the
driver when the tenant's processes run. No move waits for the link while it has the driver, so moves cannot
deadlock.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

from vgpud.hardware.suspender import Session
from vgpud.pace import Pace


class Links:
    """The links off devices, by UUID, for which users take turns; and the memory that is on its way to
    devices.
    """

    def __init__(self) -> None:
        self.off: defaultdict[str, Pace] = defaultdict(lambda: Pace(rest_factor=0))
        self.arrivals: list[Holds] = []  # moves whose memory is on its way
        self._ended = asyncio.Event()

    def arriving_bytes(self, device_uuids: Sequence[str]) -> int:
        """Bytes of moves whose memory is on its way to the devices; NVML may show a part of it there."""
        return sum(one.arriving_bytes for one in self.arrivals if {*one.arriving_at} & {*device_uuids})

    async def end_of_one(self) -> None:
        """Waits until a move ends whose memory was on its way."""
        await self._ended.wait()

    def end(self, holds: "Holds") -> None:
        if holds in self.arrivals:
            self.arrivals.remove(holds)
            self._ended.set()
            self._ended = asyncio.Event()


class Holds:
    """What one move holds, for a tenant of `user`. `session` makes a session of the driver."""

    def __init__(
        self, links: Links, user: int, session: Callable[[], AbstractAsyncContextManager[Session]]
    ) -> None:
        self._links = links
        self._user = user
        self._begin = session
        self._session: Session | None = None
        #: Does the memory go from device to device, without the host? If so, the move holds the driver until
        #: the memory is on the new device.
        self.direct = False
        self.arriving_at: tuple[str, ...] = ()
        self.arriving_bytes = 0
        self._off, self._driver = AsyncExitStack(), AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._links.end(self)
        await self._off.aclose()
        await self.end_driver()

    async def leave(self, device_uuids: Sequence[str]) -> None:
        """Reserves the links by which memory leaves the devices. The method `driver` frees these links."""
        for uuid in sorted(device_uuids):
            await self._off.enter_async_context(self._links.off[uuid].turn(self._user))

    async def driver(self) -> Session:
        """Takes the driver if it is not held yet. Raises VgpuError."""
        if self._session is None:
            self._session = await self._driver.enter_async_context(self._begin())
            await self._off.aclose()
        return self._session

    async def end_driver(self) -> None:
        self._session = None
        await self._driver.aclose()

    def arrive(self, device_uuids: Sequence[str], memory_bytes: int) -> None:
        """Counts memory as being on its way to the devices, until the move ends or is undone."""
        self.arriving_at, self.arriving_bytes = tuple(device_uuids), memory_bytes
        self._links.arrivals.append(self)

    def end_arrival(self) -> None:
        self._links.end(self)

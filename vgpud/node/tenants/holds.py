"""The resources that moves share, and those that one move holds.

Moves of several tenants overlap. Each move takes three resources in the same order, so that moves cannot
deadlock: the link off the old device, the driver (one session of vgpu-suspend), and the link onto the new
device. A move frees the link off the old device when it has the driver, and the driver when the tenant's
processes run. A move that waits longer than _ARRIVE_SECONDS for the link onto the new device gives the
driver back, because the tenant that uses the link may hang.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

from vgpud.hardware.suspender import Session
from vgpud.pace import Pace

_ARRIVE_SECONDS = 5.0  # maximum wait for a link while the session holds the driver


class Links:
    """The links of the devices, by UUID; users take turns for those off a device."""

    def __init__(self) -> None:
        self.off: defaultdict[str, Pace] = defaultdict(lambda: Pace(rest_factor=0))
        self.onto: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)


class Holds:
    """What one move holds, for a tenant of `user`. `session` makes a session of the driver."""

    def __init__(
        self, links: Links, user: int, session: Callable[[], AbstractAsyncContextManager[Session]]
    ) -> None:
        self._links = links
        self._user = user
        self._begin = session
        self._session: Session | None = None
        #: Does the memory go from device to device, without the host? Then the driver is held until it is
        #: there.
        self.direct = False
        self._off, self._driver, self._onto = AsyncExitStack(), AsyncExitStack(), AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._off.aclose()
        await self.end_driver()
        await self.end_arrival()

    async def leave(self, device_uuids: Sequence[str]) -> None:
        """Takes the links by which memory leaves the devices. `driver` frees them."""
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

    async def arrive(self, device_uuids: Sequence[str]) -> None:
        """Locks the links to the devices; `end_arrival` unlocks them. If a link is not free within
        _ARRIVE_SECONDS, ends the driver's session, so that others can use the driver, and waits on.
        """
        for uuid in sorted(device_uuids):
            link = self._links.onto[uuid]
            try:
                async with asyncio.timeout(_ARRIVE_SECONDS):
                    await self._onto.enter_async_context(link)
            except TimeoutError:
                await self.end_driver()
                await self._onto.enter_async_context(link)

    async def end_arrival(self) -> None:
        await self._onto.aclose()

"""A metered task counts the time of its own steps on the event loop, without the time of other tasks between
them.
"""

import asyncio
from dataclasses import dataclass

import pytest

from vgpud.serve.metered import Metered


@dataclass
class Clock:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds


async def steps(clock: Clock) -> str:
    clock.seconds += 2
    await asyncio.sleep(0)
    clock.seconds += 3
    return "done"


def test_a_metered_task_is_charged_only_for_its_own_steps_on_the_event_loop() -> None:
    async def main() -> None:
        clock = Clock()
        one, other = Metered(steps(clock), clock.now), asyncio.ensure_future(steps(clock))
        assert await one == "done"
        assert one.seconds == 5
        await other

    asyncio.run(main())


def test_a_metered_task_that_fails_or_is_cancelled_raises_and_is_measured() -> None:
    clock = Clock()

    async def fails() -> None:
        clock.seconds += 2
        raise KeyError("x")

    async def waits() -> None:
        clock.seconds += 3
        await asyncio.sleep(3600)

    async def main() -> None:
        failing, waiting = Metered(fails(), clock.now), Metered(waits(), clock.now)
        with pytest.raises(KeyError):
            await failing
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waiting
        assert failing.seconds == 2
        assert waiting.seconds == 3

    asyncio.run(main())

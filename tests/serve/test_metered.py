"""Time that one piece of work uses on the event loop, without the time of what runs between its steps."""

import asyncio
import time

import pytest

from vgpud.serve.metered import Metered


def use(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def steps() -> str:
    use(0.02)
    await asyncio.sleep(0)
    use(0.02)
    return "done"


def test_only_the_steps_of_the_work_itself_are_measured() -> None:
    async def main() -> None:
        one, other = Metered(steps()), asyncio.ensure_future(steps())
        assert await one == "done"
        assert 0.04 <= one.seconds < 0.06
        await other

    asyncio.run(main())


def test_work_that_fails_or_is_cancelled_raises_and_is_measured() -> None:
    async def fails() -> None:
        use(0.02)
        raise KeyError("x")

    async def waits() -> None:
        use(0.02)
        await asyncio.sleep(3600)

    async def main() -> None:
        failing, waiting = Metered(fails()), Metered(waits())
        with pytest.raises(KeyError):
            await failing
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waiting
        assert failing.seconds >= 0.02
        assert waiting.seconds >= 0.02

    asyncio.run(main())

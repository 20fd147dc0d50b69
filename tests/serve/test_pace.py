"""All callers together, root excepted, have a bounded share of the daemon's time, however many they are."""

import asyncio
from contextlib import suppress

from tests.clock import run
from vgpud import clock
from vgpud.pace import Pace


def test_work_of_many_callers_has_a_bounded_share_of_time_and_users_take_turns() -> None:
    done: list[tuple[int, float]] = []

    async def caller(pace: Pace, user: int) -> None:
        async with pace.turn(user):
            await asyncio.sleep(1)
            pace.took(1)
            done.append((user, clock.now()))

    async def main() -> None:
        pace = Pace(rest_factor=4)
        began = clock.now()
        await asyncio.gather(*(caller(pace, 7) for _ in range(10)), caller(pace, 8))
        assert clock.now() - began == 10 * 5 + 1
        assert [user for user, _ in done[:2]] == [7, 8]

    run(main())


def test_work_that_goes_on_beside_later_turns_counts_too() -> None:
    async def main() -> None:
        pace = Pace(rest_factor=4)
        for _ in range(3):
            async with pace.turn(7):
                pace.took(1)
        began = clock.now()
        for _ in range(3):
            pace.took(2)
        async with pace.turn(7):
            assert clock.now() - began == 4 + 3 * 2 * 4

    run(main())


def test_failed_work_ends_its_turn() -> None:
    async def main() -> None:
        pace = Pace(rest_factor=4)
        for _ in range(3):
            with suppress(ZeroDivisionError):
                async with pace.turn(7):
                    pace.took(1 / 0)

    run(main())

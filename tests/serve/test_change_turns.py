"""Changes of one user are made one after the other, and leave time for those of other users."""

import asyncio

import pytest

from tests import clock
from vgpud import clock as daemon_clock
from vgpud.serve.change_turns import ChangeTurns

MOST_SECONDS = 4.0


class Changes:
    """Changes that take a second each."""

    def __init__(self) -> None:
        self.turns = ChangeTurns(MOST_SECONDS)
        self.began: dict[int, list[float]] = {}
        self.since = daemon_clock.now()

    async def one(self, user: int, seconds: float = 1.0) -> None:
        async def change() -> None:
            self.began.setdefault(user, []).append(daemon_clock.now() - self.since)
            await asyncio.sleep(seconds)

        await self.turns.run(user, change)

    def queue(self, user: int, count: int) -> "asyncio.Future[list[None]]":
        return asyncio.gather(*(self.one(user) for _ in range(count)))


def test_a_user_with_queued_changes_pauses_while_another_user_makes_changes() -> None:
    """Without the pauses the attacker always has a change under way beside those of the other user, which
    then keeps 41 % of its speed.
    """

    async def main() -> None:
        changes = Changes()
        attack = changes.queue(7, 10)
        await changes.one(8)
        await changes.one(8)
        await attack
        assert changes.began[8] == [0, 1]
        # user 7 pauses for the length of a change, until user 8 has made no change for a second
        assert changes.began[7] == [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]

    clock.run(main())


@pytest.mark.parametrize("other", [0, 8])
def test_queued_changes_of_a_user_get_half_of_the_turns_while_another_user_makes_changes(other: int) -> None:
    async def main() -> None:
        changes = Changes()
        attack = changes.queue(7, 10)
        for _ in range(10):
            await changes.one(other)
        assert changes.began[other] == list(range(10))
        assert changes.began[7][:5] == [0, 2, 4, 6, 8]
        await attack

    clock.run(main())


def test_changes_pause_only_if_their_user_queues_several_while_another_user_makes_changes() -> None:
    async def main() -> None:
        changes = Changes()
        await changes.queue(7, 5)
        assert changes.began[7] == [0, 1, 2, 3, 4]
        attack = changes.queue(7, 2)
        for _ in range(4):
            await changes.one(8)
        assert changes.began[8] == [5, 6, 7, 8]
        await attack

    clock.run(main())


def test_a_slow_or_cancelled_change_keeps_other_changes_waiting_for_a_bounded_time_only() -> None:
    async def main() -> None:
        changes = Changes()
        slow = asyncio.ensure_future(changes.one(7, 100))
        await asyncio.sleep(0)
        attack = changes.queue(7, 2)
        await asyncio.sleep(1)
        slow.cancel()
        await attack
        assert changes.began[7] == [0, MOST_SECONDS, MOST_SECONDS + 1]

    clock.run(main())

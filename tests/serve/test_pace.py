"""All users together, except root, have a bounded share of the daemon's time, however many they are."""

import asyncio
import socket
import time
from contextlib import suppress

import pytest

from tests.clock import run
from vgpud import clock
from vgpud.model.caller import Caller, Door
from vgpud.model.tenancy import Lifetime
from vgpud.pace import Pace
from vgpud.serve import peers


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


def test_work_that_a_user_causes_outside_its_turn_lengthens_its_next_pause() -> None:
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


def test_work_that_fails_ends_its_turn() -> None:
    async def main() -> None:
        pace = Pace(rest_factor=4)
        for _ in range(3):
            with suppress(ZeroDivisionError):
                async with pace.turn(7):
                    pace.took(1 / 0)

    run(main())


def test_callers_of_users_are_identified_in_turns_and_those_of_root_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attack: a user that connects repeatedly makes the event loop ask the kernel about each
    connection.
    """
    spent = 0.0
    done: list[tuple[int, float]] = []

    def identify(connection: socket.socket, door: Door) -> Caller:
        nonlocal spent
        spent += 1
        return Caller(door, 0, 0, Lifetime())

    monkeypatch.setattr(peers, "identify", identify)
    monkeypatch.setattr(time, "thread_time", lambda: spent)

    async def main() -> None:
        identities = peers.Identities(Door.READ)
        began = clock.now()

        async def arrives(user: int) -> None:
            with socket.socket() as connection:
                await identities.of(connection, user)
            done.append((user, clock.now() - began))

        await asyncio.gather(*(arrives(user) for user in [7] * 10 + [8, 0]))
        assert done[:3] == [(0, 0), (7, 0), (8, 9)]
        assert done[-1] == (7, 10 * 9)

    run(main())

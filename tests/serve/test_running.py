"""Calls and loops that go on although their caller has left or they have failed."""

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from tests import clock
from vgpud import clock as daemon_clock
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.doors import run_all
from vgpud.serve.running import Running


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (VgpuError(ErrorCode.GPU_LOST, "the device is lost", ""), "call_of_disconnected_caller_failed"),
        (RuntimeError("a bug"), "bug_in_call_of_disconnected_caller"),
    ],
)
def test_a_call_that_fails_after_its_caller_has_left_is_logged(error: Exception, event: str) -> None:
    async def main() -> None:
        running, goes_on = Running(), asyncio.Event()

        async def work() -> None:
            await goes_on.wait()
            raise error

        caller = asyncio.ensure_future(running.finish("Release", work(), None))
        await asyncio.sleep(0)
        caller.cancel()
        with suppress(asyncio.CancelledError):
            await caller
        goes_on.set()
        assert await running.end(10.0) == 0

    with capture_logs() as lines:
        clock.run(main())
    assert [line["event"] for line in lines] == ["caller_disconnected_call_continues", event]


def test_a_background_loop_is_started_again_after_a_pause_that_grows_until_it_has_run_for_long() -> None:
    starts: list[float] = []

    async def work() -> None:
        starts.append(daemon_clock.now())
        if len(starts) == 9:
            await asyncio.sleep(3600)
        elif len(starts) % 2:
            raise RuntimeError("a bug")

    async def main() -> None:
        loop = asyncio.ensure_future(run_all([work], 1.0))
        await clock.passed(4000)
        loop.cancel()

    with capture_logs() as lines:
        clock.run(main())
    pauses = [round(after - before) for before, after in pairwise(starts)]
    assert pauses[:10] == [1, 2, 4, 8, 16, 32, 60, 60, 3601, 2]
    logged = [line["event"] for line in lines][:2]
    assert logged == ["background_loop_failed_by_bug", "background_loop_ended_by_bug"]

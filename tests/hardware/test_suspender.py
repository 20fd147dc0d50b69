"""A shell script takes the place of vgpu-suspend. Each answer must belong to its order."""

import asyncio
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.clock import until
from vgpud.hardware.suspender import SESSIONS_MAX, ProcessState, Suspender
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import SuspendedProcess

# Answers each order with the state that the pid encodes. A save waits until a file exists.
PROGRAM = """#!/bin/sh
echo ready
while read -r verb pid ticks rest; do
    [ "$verb" != save ] || while [ ! -e "$1.go" ]; do sleep 0.01; done
    [ "$verb" != unlock ] || exit 1
    echo "0 CUDA_SUCCESS $((pid % 10))"
done
"""


def process(pid: int) -> SuspendedProcess:
    return SuspendedProcess(pid, 7, 0)


def suspender(folder: Path) -> Suspender:
    program = folder / "suspend"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return Suspender(program, folder / "lock")


def test_a_late_answer_of_vgpu_suspend_is_not_taken_for_that_of_the_next_call(tmp_path: Path) -> None:
    """The save of one process exceeds its time limit, and the next order is about another process."""

    async def work() -> None:
        async with suspender(tmp_path).session(1, "a") as session:
            for _ in range(2):
                with pytest.raises(VgpuError) as late:
                    await session.save(process(12), 0.05)
                assert late.value.code is ErrorCode.HELPER_TIMEOUT
            (tmp_path / "lock.go").touch()
            assert await session.state(process(11)) is ProcessState.LOCKED
            assert await session.state(process(10)) is ProcessState.RUNNING

    asyncio.run(work())


def test_the_death_of_vgpu_suspend_during_a_call_is_an_error_of_a_failed_helper(tmp_path: Path) -> None:
    async def work() -> None:
        async with suspender(tmp_path).session(1, "a") as session:
            for _ in range(2):
                with pytest.raises(VgpuError) as gone:
                    await session.unlock(process(10))
                assert gone.value.code is ErrorCode.HELPER_FAILED

    asyncio.run(work())


def test_a_session_ends_without_waiting_for_the_end_of_its_vgpu_suspend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the program takes 0.1 s on a card. A thread still waits for it."""

    async def work() -> None:
        made, may_end, waited = suspender(tmp_path), threading.Event(), list[int]()
        wait = subprocess.Popen.wait

        def late(program: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
            may_end.wait()
            waited.append(wait(program, timeout))
            return waited[-1]

        monkeypatch.setattr(subprocess.Popen, "wait", late)
        for _ in range(2):
            async with made.session(1, "a") as session:
                assert await session.state(process(10)) is ProcessState.RUNNING
        settled = asyncio.create_task(made.settle())
        await asyncio.sleep(0)
        assert not waited and not settled.done()
        may_end.set()
        await settled
        assert waited == [-signal.SIGKILL] * 2

    asyncio.run(work())


def test_twenty_suspensions_of_one_user_delay_another_user_by_those_under_way_and_one(tmp_path: Path) -> None:
    """Each suspension by the attacker lasts until the driver gives up waiting for the attacker's kernel."""

    async def work() -> None:
        made, order = suspender(tmp_path), []

        async def suspend(user: int) -> None:
            async with made.session(user, f"{user}") as session:
                order.append(user)
                await session.save(process(10), 300)

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(suspend(1))
            await until(lambda: len(order) == SESSIONS_MAX)
            group.create_task(suspend(2))
            await asyncio.sleep(0)
            (tmp_path / "lock.go").touch()
        assert order.index(2) <= SESSIONS_MAX + 1

    asyncio.run(work())

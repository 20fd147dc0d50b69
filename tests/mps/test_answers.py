"""Parsers of the MPS control daemon's answers, tested with recorded ones (535.309.01, 550.163.01) and
documented ones (580 and later), and vgpud's reaction to a silent daemon.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.modes.mps import answers
from vgpud.modes.mps.answers import ListedClient
from vgpud.modes.mps.features import Features
from vgpud.modes.mps.health import Health, Verdict
from vgpud.modes.mps.supervisor import Supervisor

# from the manual page of nvidia-cuda-mps-control (R580)
PS = """PID       ID       SERVER    DEVICE             NAMESPACE      COMMAND
9741      0        6472      GPU-cb1213a3-d6a4  4026531836     ./nbody
9743      1        6472      GPU-cb1213a3-d6a4  4026531836     python train.py
"""


@pytest.mark.parametrize(
    "recorded",
    [
        'Unknown command "get_server_status"',
        "Server 999 not found",
        "Server not found",
        "Insufficient privileges for UID 1000. Control deamon settings can only be modified by the user "
        "started it or by the root user.",
        "Not enough privilege to execute quit command",
        "Invalid priority value - must be 0 or 1!",
        "Server 1 not found\nServer 1 not found!\n1",
    ],
)
def test_known_refusals_of_the_control_daemon_are_recognised(recorded: str) -> None:
    assert answers.refusal(recorded)
    assert answers.clients(recorded) == ()
    assert answers.server_state(recorded) == ""


@pytest.mark.parametrize("good", ["", "100.0", "2G", "1234\n5678", "ACTIVE"])
def test_ordinary_answers_of_the_control_daemon_are_not_taken_for_refusals(good: str) -> None:
    assert answers.refusal(good) is None


def test_the_control_daemons_list_of_partitions_is_parsed() -> None:
    """The answers are those of NVIDIA's MPS guide, and those that public scripts for CUDA 13.1 read."""
    table = (
        "GPU           Partition   free   used   free  used  clients\n"
        "                          chunk  chunk  SM    SM\n"
        "GPU-74d43ed3  -           9      7      76    56    -\n"
        "GPU-74d43ed3  Dx4AAAAAA   -      7      -     56    Yes\n"
    )
    assert answers.partitions(table) == answers.Partitions(16, frozenset({"Dx4AAAAAA"}))
    assert answers.partitions("Static partitioning is not enabled") is None
    name = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65/Dx4AAAAAA"
    assert answers.partition_name(f"Partition {name} created") == answers.partition_name(name) == name
    refused = (
        "Failed to fulfill the requested SM partition of 9 chunks, error "
        "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
    )
    assert answers.partition_name(refused) is None and answers.refusal(refused)


def test_the_control_daemons_lists_of_servers_and_clients_are_parsed() -> None:
    assert answers.pids("") == ()
    assert answers.pids("1234\n5678\n") == (1234, 5678)
    assert answers.pids("Server 999 not found") == ()
    assert answers.clients(PS) == (
        ListedClient(9741, 6472, "./nbody"),
        ListedClient(9743, 6472, "python train.py"),
    )


@pytest.mark.parametrize(
    ("answer", "state"),
    [("ACTIVE", "ACTIVE"), ("FAULT\n", "FAULT"), ("Initializing", "INITIALIZING"), ("?", "")],
)
def test_the_states_of_mps_servers_are_parsed(answer: str, state: str) -> None:
    assert answers.server_state(answer) == state


@given(st.integers(1, 10000))
def test_a_share_is_recognised_in_the_rounded_form_that_mps_prints(hundredths: int) -> None:
    """MPS daemons of branches 535 and 550 print one decimal of a share: 33.3 for 33.33, 12.3 for 12.345."""
    percent = hundredths / 100
    assert answers.share_agrees(percent, answers.share(f"{percent:.1f}"))
    assert not answers.share_agrees(percent, round(percent, 1) + 0.2)
    assert not answers.share_agrees(percent, None)


@given(st.text(max_size=300))
def test_parsers_survive_any_answer_of_the_control_daemon(text: str) -> None:
    answers.clients(text)
    answers.pids(text)
    answers.memory(text)
    answers.share(text)
    answers.server_state(text)


@pytest.mark.parametrize(
    ("capability", "version", "limit"),
    [((6, 1), 0, 16), ((7, 0), 0, 48), ((9, 0), 13000, 48), ((9, 0), 13010, 60), (None, 0, 48)],
)
def test_the_maximum_number_of_mps_clients_is_that_of_the_driver(
    capability: tuple[int, int] | None, version: int, limit: int
) -> None:
    """A V100 (compute capability 7.0) is a Volta device with 48 clients. NVIDIA's device plugin counts it as
    older (cmd/mps-control-daemon/mps/device.go).
    """
    assert Features(version=version).client_limit(capability) == limit


def test_a_silent_mps_daemon_is_reported_once_and_ended_after_its_timeout() -> None:
    health = Health()
    assert not health.answered()
    assert [health.silent(now, 30) for now in (0.0, 10.0, 29.0, 30.0)] == [
        Verdict.SAY,
        Verdict.WAIT,
        Verdict.WAIT,
        Verdict.END,
    ]
    assert health.answered()
    assert not health.answered()
    assert health.silent(100.0, 30) is Verdict.SAY


class Unit:
    """A fake unit that runs until it is stopped. Its watch reports the end before `stop` returns."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.watches: list[Callable[[str], None]] = []

    def running(self, _: str) -> object:
        return object() if "stopped" not in self.events else None

    def on_exit(self, _: str, ended: Callable[[str], None]) -> Callable[[], None]:
        self.watches.append(ended)
        return lambda: self.watches.remove(ended)

    def stop(self, name: str, _: float) -> None:
        self.events.append("stopped")
        for ended in self.watches:
            self.loop.call_soon_threadsafe(ended, name)

    loop: asyncio.AbstractEventLoop


def test_the_end_of_a_hanging_mps_daemon_is_recorded_after_it_has_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    unit = Unit(events)
    charge = SimpleNamespace(
        device_uuid="GPU-0",
        died=lambda _: events.append("died"),
        rules=lambda: SimpleNamespace(check_seconds=60),
        limits=lambda: None,
    )
    monkeypatch.setattr("vgpud.modes.mps.supervisor.cut_silent", lambda *_: {})
    monkeypatch.setattr("vgpud.audit.automatic", lambda name, *_, **__: events.append(name))

    async def hangs() -> None:
        unit.loop = asyncio.get_running_loop()
        supervisor = Supervisor(cast(Any, charge), cast(Any, unit))
        supervisor.watch()
        # starts the task of the health check, which the report of the daemon's end cancels
        supervisor._spawn(supervisor._silent(Verdict.END, "no answer"))
        async with asyncio.timeout(60):
            while "died" not in events:
                await asyncio.sleep(0)

    asyncio.run(hangs())
    assert events == ["stopped", "end MPS daemon", "died"]


def test_a_faulted_mps_server_is_reported_once_and_ended_after_its_timeout() -> None:
    health = Health()
    seen = [health.server(7, "FAULT", now, 30) for now in (0.0, 10.0, 30.0)]
    assert seen == [Verdict.SAY, Verdict.WAIT, Verdict.END]
    assert health.server(7, "ACTIVE", 31.0, 30) is Verdict.FINE
    assert health.server(7, "FAULT", 40.0, 30) is Verdict.SAY

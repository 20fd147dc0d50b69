"""Rules for the tests of every room: conditions (tests/conditions.py), signals, examples."""

import asyncio
import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import structlog
from hypothesis import settings

from tests.conditions import CONDITIONS, named_by
from tests.examples import USUAL
from tests.gpu import confine

# No deadlines, because a busy machine must not fail a test. Every run draws the same examples, so a
# failure is caused by the change. `./dev test --explore MINUTES` draws new ones.
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.register_profile("vgpud", deadline=None, derandomize=True, max_examples=USUAL)
settings.load_profile("vgpud")

MOST_TMPDIR_BYTES = 30
MEMORY = Path("/dev/shm")
LEAST_MEMORY_BYTES = 1 << 30
#: The rooms with the longest files. They run first, so no worker is left with a long file at the end.
LONG_ROOMS = (
    "e2e",
    "arbiter",
    "remote",
    "docs",
    "native",
    "sim",
    "lease",
    "mig",
    "ctl",
    "mps",
    "planner",
    "demo",
    "fuzz",
    "policy",
    "node",
    "runtime",
    "serve",
)
NOT_HERE = pytest.StashKey[dict[str, int]]()


def children_start_with_default_signals() -> None:
    """An exec keeps ignored signals: under nohup, a shell's `&` and some CI systems every program of a test
    would ignore SIGINT. So ignored signals get a handler that does nothing, because an exec resets handlers
    to the default.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def root_is_a_mount() -> None:
    """Makes `/` a mount, because tests in a plain chroot could not make mounts of their own. Where root may
    not mount, the tests report it.
    """
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if "/" not in mounted and os.geteuid() == 0:
        with suppress(OSError):
            confine.enter_own_root()


def sockets_have_room() -> None:
    """A socket's path has at most 108 bytes (unix(7)). If TMPDIR is too long, the tests' folders are
    in /tmp.
    """
    if len(tempfile.gettempdir()) > MOST_TMPDIR_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"


def folders_are_in_memory() -> None:
    """Puts the folders of a run into memory: they have some 30 000 files, and on a disk these take a fifth of
    the system time.

    A TMPDIR that the user set is kept. The disk is also used if the file system in memory is small (64 MiB in
    most containers) or does not run programs.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK | os.X_OK):
        return
    found = os.statvfs(MEMORY)
    if not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= LEAST_MEMORY_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def grpc_keeps_its_poller() -> None:
    """The last grpc.aio object ends gRPC's poller thread, which waits for calls that are still open.

    If the garbage collector finds that object during a later test, that test hangs.
    """

    async def make_poller() -> None:
        grpc.aio.init_grpc_aio()  # asks for the event loop, which must be running from Python 3.14 on

    asyncio.run(make_poller())


def tracebacks_are_short() -> None:
    """Without a configuration structlog draws tracebacks with rich, where that is installed: boxes with all
    local variables. One of them takes the event loop of a loaded machine for seconds.
    """
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure([structlog.processors.add_log_level, plain])


def pytest_configure(config: pytest.Config) -> None:
    children_start_with_default_signals()
    root_is_a_mount()
    sockets_have_room()
    folders_are_in_memory()
    grpc_keeps_its_poller()
    tracebacks_are_short()
    config.stash[NOT_HERE] = {}


def named(item: pytest.Item) -> list[str]:
    """Names of the conditions that a test has."""
    return [name for mark in item.iter_markers("needs") for name in mark.args]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection during the collection of tests, which live to the end. Garbage
    collection would take half of the time of the collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # runs before pytest selects tests by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(CONDITIONS[name].real for name in named(item)):
            item.add_marker("real")
    places = {room: number for number, room in enumerate(LONG_ROOMS)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        counts = item.config.stash[NOT_HERE]
        for name in [name for name in named(item) if CONDITIONS[name].real][:1]:
            counts[name] = counts.get(name, 0) + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in named(item):
        if missing := CONDITIONS[name].missing():
            pytest.skip(f"{name}: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that is skipped without a condition, or with a condition that its tier excludes."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        condition = named_by(reason)
        if condition not in CONDITIONS:
            report.outcome = "failed"
            report.longrepr = f"skipped without a condition of tests/conditions.py: {reason}"
        elif CONDITIONS[condition].real and item.get_closest_marker("real") is None:
            report.outcome = "failed"
            report.longrepr = f'needs("{condition}") is missing on this test, which was skipped: {reason}'
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_here"] = session.config.stash[NOT_HERE]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of xdist collects every test, so the last worker's count is that of all."""
    node.config.stash[NOT_HERE] = getattr(node, "workeroutput", {}).get("not_here", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    def line(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))

    lacked: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        lacked[named_by(report.longrepr[2])] += 1
    if left := config.stash[NOT_HERE]:
        tests = f"{sum(left.values())} tests of real programs ({line(left)})"
        terminalreporter.write_line(f"not tested here: {tests}; ./dev test-all runs them")
    if lacked:
        told = f"not tested here: {lacked.total()} tests for want of {line(lacked)}; docs/testing.md says how"
        terminalreporter.write_line(told)

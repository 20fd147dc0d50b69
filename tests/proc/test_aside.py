"""Queries about processes that may block in the kernel. Their answers reach the right caller, and the number
of waiting queries is bounded.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.support import eventually
from vgpud import proc
from vgpud.node.tenants.users import namespace_owner
from vgpud.proc import Aside

USER = 4242


@contextmanager
def process() -> Iterator[int]:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


class Held:
    """Queries that block until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.answered: list[str] = []

    def question(self, answer: str) -> Callable[[], str]:
        def ask() -> str:
            self.go.wait()
            return answer

        return ask

    def is_refused(self, aside: Aside, pid: int, answer: str) -> bool:
        """Returns whether the query is refused, either at once or because it was abandoned after a wait."""
        with pytest.raises(OSError) as refused:
            aside.ask(pid, self.question(answer), self.answered.append)
        return refused.value.errno == errno.EBUSY


@pytest.fixture
def held() -> Iterator[Held]:
    questions = Held()
    yield questions
    questions.go.set()


def test_each_of_two_concurrent_queries_about_one_process_gets_its_own_answer_or_none(
    held: Held,
) -> None:
    aside, pid = Aside(), os.getpid()
    answers: list[str] = []
    first_is_left = threading.Event()

    def second() -> str:
        first_is_left.wait()
        return "second"

    def asks_second() -> None:
        with suppress(OSError):  # on a busy machine the query may fail
            answers.append(aside.ask(pid, second, held.answered.append))

    first = threading.Thread(target=held.is_refused, args=(aside, pid, "first"))
    other = threading.Thread(target=asks_second)
    first.start()
    first.join(timeout=0.15)  # after this time the query of `first` is abandoned
    other.start()
    first.join()
    first_is_left.set()
    other.join()
    held.go.set()
    eventually(lambda: "first" in held.answered, "the late answer is discarded")
    assert sorted(answers + held.answered) in (["first", "second"], ["first"])


def test_the_number_of_waiting_queries_about_a_users_processes_is_bounded(held: Held) -> None:
    now = [0.0]
    aside = Aside(user_of=lambda _: USER, clock=lambda: now[0])
    with ExitStack() as stack:
        for number in range(4):
            assert held.is_refused(aside, stack.enter_context(process()), f"{number}")
        pid = stack.enter_context(process())
        asked: list[bool] = []
        for _ in range(3):
            now[0] += 60
            with pytest.raises(OSError):
                aside.ask(pid, lambda: asked.append(True))
        assert not asked
        held.go.set()
        eventually(lambda: len(held.answered) == 4, "the kernel answers")
        now[0] += 60
        aside.ask(pid, lambda: asked.append(True))
        assert asked


def test_any_error_of_a_query_about_a_process_is_raised_to_its_caller() -> None:
    aside = Aside()
    for _ in range(2):  # the thread that answered the first query answers the next ones
        with pytest.raises(OverflowError):
            aside.ask(os.getpid(), lambda: os.pread(0, 1, 2**80))
    assert aside.ask(os.getpid(), lambda: 1) == 1


def test_a_slow_directory_of_users_delays_no_query_of_another_thread(held: Held) -> None:
    looked_up, found = threading.Event(), threading.Event()

    def user_of(_: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            looked_up.set()
            found.wait()
        return USER

    aside = Aside(user_of)
    limit = threading.Timer(20, found.set)
    with process() as one, process() as two:
        assert held.is_refused(aside, one, "one")
        asker = threading.Thread(target=aside.ask, args=(two, lambda: "two"))
        asker.start()
        looked_up.wait()
        limit.start()
        assert aside.ask(os.getpid(), lambda: 1) == 1
        assert not found.is_set()
        limit.cancel()
        found.set()
        asker.join()


def test_a_refused_query_about_a_user_namespace_leaves_no_descriptor_open(held: Held) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with process() as pid:
        with pytest.raises(OSError):
            proc.aside(pid, held.question("late"))
        before = descriptors()
        for _ in range(3):
            # the query raises an error, because None would mean a process of the host's namespace
            with pytest.raises(OSError):
                namespace_owner(pid)
        assert descriptors() == before


def test_a_query_about_a_process_waits_two_seconds_at_most_however_slow_its_checks_are() -> None:
    """The processors of the host are busy: here each check by the caller takes 0.2 s."""
    now, answers = [0.0], threading.Event()

    def slow() -> float:
        now[0] += 0.2
        return now[0]

    aside = Aside(clock=slow)
    with pytest.raises(OSError, match="busy"):
        aside.ask(os.getpid(), answers.wait)
    answers.set()
    assert 2 <= now[0] < 3


STARVED = """
import os
from vgpud.proc import aside

def question():
    os.write(1, b"asked\\n")
    return os.read(0, 100)

print(aside(os.getpid(), question).decode())
"""


def test_a_caller_that_was_stopped_meanwhile_still_gets_its_answer() -> None:
    """A stopped process stands for one that gets no processor time. It is stopped for longer than an answer
    may take on an idle processor.
    """
    words = [sys.executable, "-c", STARVED]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starved:
        assert starved.stdout is not None
        assert starved.stdout.readline() == "asked\n"
        starved.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, starved.pid, os.WSTOPPED)
        stopped = time.monotonic()
        eventually(lambda: time.monotonic() > stopped + 0.5, "it has been without a processor")
        starved.send_signal(signal.SIGCONT)
        assert starved.communicate("the answer")[0] == "the answer\n"

"""Threads of processes that are gone or not readable: the check finds nothing and raises nothing."""

import errno
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from vgpud.node.tenants import blocked
from vgpud.node.tenants.blocked import Looks
from vgpud.proc import start_ticks

GONE = (2**22 + 1, 1)  # pid and start time; the pid is above the largest one of proc(5)


def own() -> tuple[int, int]:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return os.getpid(), ticks


def open_in_proc() -> Counter[str]:
    """Counts the files of /proc that this process has open.

    Other descriptors are left out: other tests' threads and the garbage collector open and close them at any
    time.
    """
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    return Counter(link for link in links if link.startswith("/proc/") and not link.endswith("/fd"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESRCH, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("wanted", ["/proc/", "task", "syscall", "start_ticks"])
def test_unreadable_processes_are_ignored(monkeypatch: pytest.MonkeyPatch, wanted: str, code: int) -> None:
    real, refused = os.open, []

    def fail(*words: object) -> int:
        refused.append(words)
        raise OSError(code, os.strerror(code))

    def refuse(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path.endswith(wanted) or (wanted == "/proc/" and path.startswith(wanted)):
            fail(path)
        return real(path, flags, *rest, dir_fd=dir_fd)

    before = open_in_proc()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        if wanted == "start_ticks":
            patched.setattr(blocked, "start_ticks", fail)
        looks = Looks()
        for _ in range(2):
            looks.look([own(), GONE])
        assert looks.blocked([own()]) == ()
    assert refused
    assert not open_in_proc() - before


def test_an_unknown_architecture_shows_no_blocked_threads() -> None:
    looks = Looks(machine="m68k")
    looks.look([own()])
    assert looks.blocked([own()]) == ()
    assert not looks.is_unsure

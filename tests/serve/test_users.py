"""Quotas and limits treat all uids of a user as one user."""

import errno
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.clock import until
from tests.conditions import needs
from tests.e2e.support import eventually
from tests.fusefile import fuse_file
from tests.otheruser import open_folder
from tests.serve.live import Live
from vgpud.api.client import Client
from vgpud.model.caller import Caller, Door
from vgpud.model.tenancy import Owner
from vgpud.node.tenants.users import SubordinateUids
from vgpud.serve import peers
from vgpud.serve.relay import ConnectionLimits

USER, FIRST = 4242, 1_000_000
# Becomes the user, makes a user namespace, waits for its uid map, switches to a uid of it, and connects
IN_A_NAMESPACE = """
import ctypes, os, socket, sys
path, inside, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("made", flush=True); input()
os.setresgid(inside, inside, inside); os.setresuid(inside, inside, inside)
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX)); held[-1].connect(path)
print("connected", flush=True); input()
"""
WITHOUT_A_NAMESPACE = """
import os, socket, sys
os.setgroups([]); os.setresgid(int(sys.argv[2]), -1, -1); os.setresuid(*[int(sys.argv[2])] * 3)
held = socket.socket(socket.AF_UNIX); held.connect(sys.argv[1])
print("connected", flush=True); input()
"""

pytestmark = needs("root")


@pytest.fixture
def path() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder / "s"


@contextmanager
def subordinate(path: Path, inside: int, count: int = 1) -> Iterator[None]:
    """Runs a process in a user namespace of USER that holds `count` connections as uid FIRST + inside."""
    words = [sys.executable, "-c", IN_A_NAMESPACE, str(path), str(inside), str(count)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == "made\n"
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{kind}").write_text(f"0 {FIRST} 65536\n")
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "connected\n"
        yield
        print(file=child.stdin, flush=True)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        yield listener


def accepted(listener: socket.socket) -> Caller:
    connection, _ = listener.accept()
    with connection:
        return peers.identify(connection, Door.TENANT)


@needs("user-namespaces")
def test_a_subordinate_uid_counts_as_the_owner_of_its_namespace(path: Path) -> None:
    with listening(path) as listener:
        for inside in (0, 1, 65535):
            with subordinate(path, inside):
                caller = accepted(listener)
                assert (caller.uid, caller.user) == (FIRST + inside, USER)
                assert caller.quota_owner == Owner(USER, FIRST + inside)
                assert caller.process.pid > 0


def test_a_subordinate_uid_outside_of_its_namespace_counts_as_its_user(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program made set-uid inside the namespace runs with a subordinate uid outside of it. Its caller
    counts as the user that owns the range.
    """

    def refused(_: int) -> NoReturn:
        pytest.fail("the event loop waits for a directory service")

    monkeypatch.setattr(pwd, "getpwuid", refused)
    subuid = tmp_path / "subuid"
    subuid.write_text(f"# comment\nbroken:x:1\n{USER}:{FIRST}:65536\nno-such-user:{FIRST + 65536}:65536\n")
    monkeypatch.setattr(peers, "SUBORDINATE", SubordinateUids(subuid))
    with listening(path) as listener:
        for uid, user in ((FIRST, USER), (FIRST + 65535, USER), (FIRST + 65536, FIRST + 65536), (7, 7)):
            words = [sys.executable, "-c", WITHOUT_A_NAMESPACE, str(path), str(uid)]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdin and child.stdout
                assert child.stdout.readline() == "connected\n"
                caller = accepted(listener)
                assert (caller.uid, caller.user) == (uid, user)
                print(file=child.stdin, flush=True)


def test_changed_ranges_of_subordinate_uids_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    ranges = SubordinateUids(file)
    assert ranges.user_of(FIRST) == FIRST
    file.write_text(f"{USER}:{FIRST}:10\n")
    assert (ranges.user_of(FIRST), ranges.user_of(FIRST + 10)) == (USER, FIRST + 10)
    file.unlink()
    assert ranges.user_of(FIRST) == FIRST


def test_a_directory_service_that_hangs_delays_no_query_for_a_user(tmp_path: Path) -> None:
    answers = threading.Event()

    def uid_of(name: str) -> int:
        assert answers.wait(60)
        if name == "gone":
            raise KeyError(name)
        return USER

    file = tmp_path / "subuid"
    file.write_text(f"alice:{FIRST}:10\ngone:{FIRST + 10}:10\n{USER + 1}:{FIRST + 20}:10\n")
    ranges = SubordinateUids(file, uid_of)
    assert [ranges.user_of(FIRST + n) for n in (0, 10, 20)] == [FIRST, FIRST + 10, USER + 1]
    answers.set()
    eventually(lambda: ranges.user_of(FIRST) == USER, "the name is looked up")
    assert ranges.user_of(FIRST + 10) == FIRST + 10


LEAVES_ITS_CONNECTION = IN_A_NAMESPACE.replace(
    'print("connected", flush=True); input()',
    """
if os.fork() == 0:
    print("connected", flush=True); input()
""",
)


@needs("user-namespaces")
def test_a_connection_of_a_subordinate_uid_whose_process_has_ended_is_refused(path: Path) -> None:
    """An attack: only a directory service knows the user's range of subordinate uids, so only the process
    leads to its user. The process connects, leaves the connection to its child, and ends.
    """
    with listening(path) as listener:
        words = [sys.executable, "-c", LEAVES_ITS_CONNECTION, str(path), "1", "1"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin and child.stdout
            assert child.stdout.readline() == "made\n"
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{kind}").write_text(f"0 {FIRST} 65536\n")
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == "connected\n"
            child.wait()
            with pytest.raises(OSError, match=r"ended|No such process|Invalid argument"):
                accepted(listener)
            print(file=child.stdin, flush=True)


@needs("user-namespaces")
def test_a_connection_of_a_subordinate_uid_is_refused_while_the_kernel_does_not_name_its_namespace(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack before Linux 6.11: the process is in an exec that does not end, and reads of
    /proc/PID/ns/user wait for that.
    """

    def busy(pid: int) -> NoReturn:
        raise OSError(errno.EBUSY, "the kernel does not answer")

    monkeypatch.setattr(peers, "namespace_owner", busy)
    with listening(path) as listener, subordinate(path, 1), pytest.raises(OSError, match="does not answer"):
        accepted(listener)


@needs("user-namespaces")
def test_connections_of_all_subordinate_uids_of_a_user_count_together() -> None:
    live = Live(ConnectionLimits(total=30, per_uid=4, admin=1))
    try:
        with subordinate(live.ro, 1, 3), subordinate(live.ro, 2, 3):
            live.do(settled(live, 6))
            assert live.server.relay.peers.connections_of(USER) == 4
            assert live.server.relay.peers.refused == 2
            with Client(live.ro, 300) as other:
                assert other.get_node().status == "well"
    finally:
        live.close()


async def settled(live: Live, connections: int) -> None:
    known = live.server.relay.peers
    await until(lambda: known.served + known.refused >= connections)


CONNECTS_AND_EXECS = """
import os, socket, sys
os.setgroups([]); os.setresgid(4242, 4242, 4242)
held = os.open(sys.argv[2], os.O_RDWR | os.O_CLOEXEC)
os.setresuid(4242, 4242, 4242)
line = socket.socket(socket.AF_UNIX); line.connect(sys.argv[1]); os.set_inheritable(line.fileno(), True)
os.execvp("sleep", ["sleep", "1000"])
"""


@needs("fuse")
def test_a_caller_whose_exec_does_not_end_blocks_no_socket(path: Path, tmp_path: Path) -> None:
    """An attack: a process connects, and its exec closes a file of its own file system, which does not
    answer. vgpud disconnects a caller whose user the kernel does not name.
    """
    callers: list[Caller] = []

    def serve() -> None:
        with suppress(OSError):
            callers.append(accepted(listener))

    with listening(path) as listener, fuse_file(tmp_path / "mount", "flush") as file:
        words = [sys.executable, "-c", CONNECTS_AND_EXECS, str(path), str(file.path)]
        child = subprocess.Popen(words)
        assert file.asked()
        door = threading.Thread(target=serve, daemon=True)
        door.start()
        eventually(lambda: not door.is_alive(), "the caller is identified while its exec goes on")
    child.kill()
    child.wait()
    assert [(caller.uid, caller.user) for caller in callers] in ([], [(USER, USER)])

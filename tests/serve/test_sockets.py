"""The public sockets: modes, groups, a second daemon, sockets from systemd."""

import grp
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.conditions import needs
from tests.lease.conftest import eventually
from tests.native.harness import ARBITER
from vgpud.model.caller import Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.sockets import (
    PublicSockets,
    claim,
    passed_sockets,
    private_folder,
    public_sockets,
    send_away,
)
from vgpud.untrusted import Untrusted, refuse_descriptors, renew_ended_keeper


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="vgs-") as folder:
        yield Path(folder) / "run"


def opened(run_dir: Path, group: str = "") -> PublicSockets:
    return public_sockets(run_dir, group, {})


def modes(run_dir: Path) -> dict[str, int]:
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in run_dir.iterdir() if p.is_socket()}


def test_a_public_socket_refuses_passed_descriptors_before_a_caller_can_connect(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ro.sock", "vgpud.sock", "admin.sock")
    there: list[list[str]] = []
    monkeypatch.setattr(
        "vgpud.serve.sockets.refuse_descriptors",
        lambda _: there.append([name for name in names if (run_dir / name).exists()]),
    )
    opened(run_dir).close()
    assert there == [[], ["ro.sock"], ["ro.sock", "vgpud.sock"]]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_socket_modes_do_not_depend_on_the_umask(run_dir: Path, umask: int) -> None:
    run_dir.mkdir()
    (run_dir / "private").mkdir()
    before = os.umask(umask)
    try:
        sockets = opened(run_dir)
    finally:
        os.umask(before)
    assert modes(run_dir) == {"ro.sock": 0o666, "vgpud.sock": 0o660, "admin.sock": 0o600}
    assert stat.S_IMODE((run_dir / "private").stat().st_mode) == 0o700
    assert list((run_dir / "private").iterdir()) == []
    sockets.close()
    assert modes(run_dir) == {}


@needs("root")
def test_only_the_tenant_socket_belongs_to_the_group(run_dir: Path) -> None:
    group = next(g for g in grp.getgrall() if g.gr_gid != 0)
    sockets = opened(run_dir, group.gr_name)
    gids = {p.name: p.stat().st_gid for p in run_dir.iterdir() if p.is_socket()}
    assert gids == {"ro.sock": 0, "vgpud.sock": group.gr_gid, "admin.sock": 0}
    sockets.close()


def refused(run_dir: Path, group: str = "") -> VgpuError:
    with pytest.raises(VgpuError) as caught:
        opened(run_dir, group)
    assert caught.value.code is ErrorCode.BAD_SETTING
    assert caught.value.hint
    return caught.value


def test_a_missing_group_is_named_with_the_command_that_makes_it(run_dir: Path) -> None:
    assert "groupadd --system nobody-has-this" in refused(run_dir, "nobody-has-this").hint


def test_a_second_daemon_in_the_same_folder_is_refused(run_dir: Path) -> None:
    held = claim(run_dir)
    with pytest.raises(VgpuError) as caught:
        claim(run_dir)
    assert caught.value.code is ErrorCode.BAD_SETTING and "another daemon runs" in caught.value.sentence
    os.close(held)
    os.close(claim(run_dir))


@pytest.mark.parametrize(
    ("taken", "make", "sentence"),
    [
        ("private/lock", claim, "cannot lock RUN/private/lock: Is a directory"),
        ("vgpud.sock", opened, "cannot listen on RUN/vgpud.sock: Is a directory"),
    ],
)
def test_a_path_in_the_run_folder_that_is_taken_is_named(
    run_dir: Path, taken: str, make: Callable[[Path], object], sentence: str
) -> None:
    private_folder(run_dir)
    (run_dir / taken).mkdir()
    with pytest.raises(VgpuError) as caught:
        make(run_dir)
    assert caught.value.sentence == sentence.replace("RUN", str(run_dir))
    assert "VGPUD_RUN_DIR" in caught.value.hint


def test_callers_of_a_daemon_that_does_not_start_are_disconnected(tmp_path: Path) -> None:
    """The daemon disconnects the waiting callers before it ends, because systemd would start it again for
    each of them. systemd does not disconnect them: its close(2) might hang in a descriptor that a caller
    passed.
    """
    with Untrusted(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        refuse_descriptors(listener)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        caller.connect(str(tmp_path / "s"))
        send_away([listener])
        assert caller.recv(1) == b""


def test_without_a_keeper_process_a_connection_is_shut_down_and_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close would be the last one of the descriptors that the caller passed, and could wait without
    end.
    """
    monkeypatch.setattr(Untrusted, "program", tmp_path / "missing")
    monkeypatch.setattr(Untrusted, "_running", None)
    with socket.socket(socket.AF_UNIX) as held, socket.socket(socket.AF_UNIX) as caller:
        held.bind(str(tmp_path / "s"))
        held.listen()
        caller.connect(str(tmp_path / "s"))
        listener = Untrusted(fileno=held.fileno())
        listener.setblocking(False)
        send_away([listener])
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(1)
        connection, _ = listener.accept()
        descriptor = connection.fileno()
        connection.close()
        assert caller.recv(1) == b""
        assert stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        listener.close()


def keepers_of(*sockets: socket.socket) -> set[int]:
    """The keeper processes that have a copy of each of the sockets."""
    wanted = {os.fstat(one.fileno()).st_ino for one in sockets}
    found = set()
    for keeper in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (keeper / "comm").read_text() == "vgpu-keeper\n" and wanted <= {
                entry.stat().st_ino for entry in (keeper / "fd").iterdir()
            }:
                found.add(int(keeper.name))
    return found


class Kept:
    """A listener and a connection to it, which one keeper process holds."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = str(path)
        self.listener = stack.enter_context(Untrusted(socket.AF_UNIX))
        self.listener.bind(self._path)
        self.listener.listen()
        self.caller, self.connection = map(stack.enter_context, self.call())
        eventually(lambda: bool(keepers_of(self.listener, self.connection)))
        [self.keeper] = keepers_of(self.listener, self.connection)

    def call(self) -> tuple[socket.socket, socket.socket]:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(self._path)
        return caller, self.listener.accept()[0]

    def kill(self) -> None:
        """Returns when the keeper has ended."""
        pidfd = os.pidfd_open(self.keeper)
        os.kill(self.keeper, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(Untrusted, "program", ARBITER)
    monkeypatch.setattr(Untrusted, "_running", None)
    with ExitStack() as stack:
        yield Kept(tmp_path / "s", stack)


def test_a_new_keeper_holds_the_sockets_that_a_killed_keeper_held(kept: Kept) -> None:
    kept.kill()
    renew_ended_keeper()
    eventually(lambda: bool(keepers_of(kept.listener, kept.connection)))


def test_a_new_keeper_closes_a_connection_after_the_former_keeper_was_killed(kept: Kept) -> None:
    kept.kill()
    kept.connection.close()
    eventually(lambda: bool(keepers_of(kept.listener)))
    assert kept.caller.recv(1) == b""


def test_a_keeper_that_reads_no_messages_is_replaced_and_its_connections_stay_open(kept: Kept) -> None:
    """A keeper process that is killed does not end while a close(2) in it hangs. Like the stopped keeper of
    this test, it then reads no messages, and its connection to vgpud stays open.
    """
    os.kill(kept.keeper, signal.SIGSTOP)
    try:
        for _ in range(1000):
            for one in kept.call():
                one.close()
        eventually(lambda: len(keepers_of(kept.listener, kept.connection)) > 1)
    finally:
        os.kill(kept.keeper, signal.SIGCONT)
    eventually(lambda: kept.keeper not in keepers_of(kept.listener))
    kept.connection.send(b"x")
    assert kept.caller.recv(1) == b"x"


def test_sockets_of_a_killed_daemon_are_replaced(run_dir: Path) -> None:
    left = opened(run_dir)
    for one in left.listening.values():
        one.close()
    opened(run_dir).close()


def test_a_socket_path_above_108_bytes_is_refused(run_dir: Path) -> None:
    assert "bytes" in refused(run_dir / ("x" * 100)).sentence


def test_a_private_folder_that_is_a_link_is_refused(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "private").symlink_to("/tmp")
    assert "is not a folder of uid" in refused(run_dir).sentence
    (run_dir / "private").unlink()
    (run_dir / "private").touch()
    with pytest.raises(VgpuError):
        private_folder(run_dir)


PASSED = """
import os, socket, sys
from pathlib import Path
from vgpud.model.errors import VgpuError
from vgpud.serve.sockets import passed_sockets, public_sockets, runtime_socket
names, kinds = sys.argv[2], sys.argv[3].split(",")
made = []
for kind in kinds:
    one = socket.socket(socket.AF_INET if kind == "inet" else socket.AF_UNIX)
    if kind == "unix":
        one.bind(f"{sys.argv[1]}/s{len(made)}")
    if kind != "deaf":
        one.listen()
    made.append(one)
copies = [os.dup(one.fileno()) for one in made]
for i, fd in enumerate(copies):
    os.dup2(fd, 3 + i)  # as systemd does, over what lies there
environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(made)), "LISTEN_FDNAMES": names}
environment["A"] = "b"
try:
    passed = passed_sockets(environment)
    assert environment == {"A": "b"}, environment
    sockets = public_sockets(Path(sys.argv[1]), "", passed)
    runtime = runtime_socket(Path(sys.argv[1]), "", passed)
    assert not sockets.made
    found = {"RUNTIME": runtime.listening} | {d.name: s for d, s in sockets.listening.items()}
    print(sorted((name, s.fileno(), s.get_inheritable(), s.gettimeout()) for name, s in found.items()))
    sockets.close()
    runtime.close()
    print(sorted(os.listdir(sys.argv[1])))
except VgpuError as error:
    print(error.code.name, error.sentence)
"""


def passed(folder: Path, names: str, kinds: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PASSED, str(folder), names, kinds], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_sockets_passed_by_systemd_are_used(tmp_path: Path) -> None:
    shown = passed(tmp_path, "admin:ro:runtime:tenant", "unix,unix,unix,unix")
    assert shown[0] == str(
        [
            ("ADMIN", 3, False, 0.0),
            ("READ", 4, False, 0.0),
            ("RUNTIME", 5, False, 0.0),
            ("TENANT", 6, False, 0.0),
        ]
    )
    assert shown[1] == "['s0', 's1', 's2', 's3']"  # systemd made these sockets, and removes them


def test_sockets_that_systemd_does_not_pass_are_created(run_dir: Path) -> None:
    """The unit of one socket is not enabled, so systemd does not pass that socket."""
    run_dir.mkdir()
    shown = passed(run_dir, "admin:ro:tenant", "unix,unix,unix")
    assert "('RUNTIME', " in shown[0]
    assert shown[1] == "['private', 's0', 's1', 's2']"


@pytest.mark.parametrize(
    ("names", "kinds", "why"),
    [
        ("other", "unix", "'other' that systemd passed is unknown"),
        ("", "unix", "'' that systemd passed is unknown"),
        ("ro:ro", "unix,unix", "passed twice"),
        ("ro", "inet", "is not a listening Unix stream socket"),
        ("ro", "deaf", "is not a listening Unix stream socket"),
    ],
)
def test_unsuitable_sockets_from_systemd_are_refused(
    tmp_path: Path, names: str, kinds: str, why: str
) -> None:
    assert why in passed(tmp_path, names, kinds)[0]


def test_sockets_that_systemd_passed_to_another_process_are_ignored(run_dir: Path) -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "ro"}
    sockets = public_sockets(run_dir, "", passed_sockets(environment))
    assert sockets.made
    assert environment == {}
    assert set(sockets.listening) == set(Door)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(run_dir / "ro.sock"))
    sockets.close()

"""The start of a session process, before the caller has proved that it has a grant."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remote.test_parts import ALICE
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.remote import entry, session, wire
from vgpud.remote.grants import CERTIFICATE, FILE, Grants, of_this_node
from vgpud.settings import Settings

_REPORT = """
import json, sys
from vgpud.remote import entry
code = entry.main()
print(json.dumps([code, sorted(sys.modules)]))
"""
_COSTLY = {
    "grpc",
    "google",
    "pydantic",
    "structlog",
    "vgpud.policy",
    "vgpud.remote.session",
    "vgpud.settings",
}


def _asked(state: Path, line: bytes) -> tuple[str, int, set[str]]:
    """Returns the reply of a session process to a call, its exit code, and the modules that it imported."""
    door, session = socket.socketpair()
    accepter, stdin = socket.socketpair()
    with door, session, accepter, stdin:
        door.sendall(line)
        socket.send_fds(accepter, [b"\0"], [session.fileno()])
        done = subprocess.run(
            [sys.executable, "-c", _REPORT],
            env={**os.environ, "VGPUD_STATE_DIR": str(state)},
            stdin=stdin.fileno(),
            capture_output=True,
            text=True,
            check=True,
        )
        code, modules = json.loads(done.stdout)
        assert done.stderr == ""
        return door.recv(4096).decode(), code, set(modules)


@pytest.mark.parametrize("call", ["open", "status", "attach", "none"])
def test_a_call_without_a_grant_is_refused_before_the_costly_imports(tmp_path: Path, call: str) -> None:
    _, token = Grants(tmp_path / FILE).add(ALICE, "f" * 64)
    lines = {
        "open": wire.encode(wire.Open(token="x" + token[1:])),
        "status": wire.encode(wire.Status(token="x" + token[1:])),
        "attach": wire.encode(wire.Attach("a", "b")),
        "none": b"{}\n",
    }
    said, code, modules = _asked(tmp_path, lines[call])
    assert f'"number":{201 if call in ("open", "status") else 103},' in said
    assert code == (4 if call in ("open", "status") else 2)
    assert not modules & _COSTLY


def test_a_status_call_names_the_tokens_user_without_the_costly_imports(tmp_path: Path) -> None:
    _, token = Grants(tmp_path / FILE).add(ALICE, "f" * 64)
    said, code, modules = _asked(tmp_path, wire.encode(wire.Status(token=token)))
    assert (json.loads(said), code) == ({"result": {"user": "alice"}}, 0)
    assert not modules & _COSTLY


@pytest.mark.parametrize("problem", ["permission", "form", "depth"])
def test_a_caller_learns_nothing_of_grants_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    _, token = Grants(tmp_path / FILE).add(ALICE, "f" * 64)
    if problem == "permission":

        def denied(_: Path) -> str:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(Path, "read_text", denied)
    else:
        (tmp_path / FILE).write_text("{}" if problem == "form" else "[" * 100_000)
    monkeypatch.setenv("VGPUD_STATE_DIR", str(tmp_path))
    logged: list[VgpuError] = []
    monkeypatch.setattr(session, "log_failure", logged.append)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(wire.encode(wire.Status(token="x" + token[1:])))
        monkeypatch.setattr(entry, "_door", lambda: far)
        assert entry.main() == ErrorCode.LEDGER_FAILED.exit_code
        with pytest.raises(VgpuError) as told:
            wire.result(near.recv(4096))
    assert told.value.sentence == "the node cannot read its grants"
    assert (told.value.code, told.value.hint) == (ErrorCode.LEDGER_FAILED, wire.JOURNAL)
    assert str(tmp_path / FILE) in str(logged[0])


@pytest.mark.parametrize(
    ("leaves", "sentence"), [(True, "the line is not JSON"), (False, "the remote session failed: timed out")]
)
def test_a_session_process_ends_if_the_door_makes_no_call(
    leaves: bool, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = socket.socketpair()
    monkeypatch.setattr(entry, "_FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(entry, "_door", lambda: far)
    monkeypatch.setattr(session, "log_failure", lambda _: None)
    with near, far:
        if leaves:
            near.shutdown(socket.SHUT_WR)
        assert entry.main() == (ErrorCode.BAD_REQUEST if leaves else ErrorCode.HELPER_FAILED).exit_code
        with pytest.raises(VgpuError, match=sentence):
            wire.result(near.recv(4096))


@pytest.mark.parametrize("is_set", [True, False])
def test_the_grants_file_is_where_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_set: bool
) -> None:
    for name, path in (
        ("VGPUD_STATE_DIR", tmp_path / "state"),
        ("VGPUD_CONFIG", tmp_path / "etc/vgpud.toml"),
    ):
        monkeypatch.setenv(name, str(path)) if is_set else monkeypatch.delenv(name, raising=False)
    settings = Settings()
    grants, certificate = of_this_node()
    assert (grants._path, certificate) == (settings.state_dir / FILE, settings.config.parent / CERTIFICATE)

"""vgpu-hook with container states and configs that the tests make."""

import ctypes
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conditions import needs
from tests.demo.node import BUILD
from tests.examples import examples
from tests.native.harness import TEST_BUILD
from tests.otheruser import as_user, open_folder
from tests.runtime.door import FakeDoor
from vgpud.serve.runtime_wire import Status

HOOK = BUILD / "bin" / "vgpu-hook"


def hook(
    run_dir: Path, state: str, *words: str, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, HOOK, f"--run-dir={run_dir}", *words],
        input=state,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_hook_programs_load_no_shared_library() -> None:
    """The hook runs as root outside of the container, and must not load the LD_PRELOAD of an image. So it is
    linked statically.
    """
    for program in (HOOK, BUILD / "bin" / "vgpu-runtime"):
        assert b"/ld-linux" not in program.read_bytes()


def test_the_hook_bind_sends_vgpud_the_pidfd_of_the_containers_init(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as init,
        FakeDoor(tmp_path / "run", [(Status.DONE, b"")]) as door,
    ):
        state = json.dumps({"id": "c1", "pid": init.pid, "bundle": "/b"})
        done = hook(door.run_dir, state, "bind", "a1")
        init.kill()
    assert (done.returncode, done.stderr) == (0, "")
    (heard,) = door.heard
    assert (heard.verb, heard.id, heard.pidfd_links) == (2, "a1", ["anon_inode:[pidfd]"])


@pytest.mark.parametrize("state", ["", "{", "[]", "{}", '{"pid": "7"}', '{"pid": 0}', '{"pid": -1}'])
def test_a_container_state_without_the_pid_of_an_init_is_refused_by_the_hook(
    tmp_path: Path, state: str
) -> None:
    done = hook(tmp_path, state, "bind", "a1")
    assert done.returncode == 1 and "cannot be watched" in done.stderr


def test_the_hook_bind_fails_if_vgpud_refuses(tmp_path: Path) -> None:
    with FakeDoor(tmp_path / "run", [(Status.REFUSED, b"it is gone (E301)")]) as door:
        done = hook(door.run_dir, '{"pid": 1}', "bind", "a1")
    assert done.returncode == 1 and done.stderr == "vgpu-hook: it is gone (E301)\n"


@needs("root")  # root is needed to become another user
def test_the_hook_tells_a_user_without_access_to_the_socket_the_setting_and_the_group(tmp_path: Path) -> None:
    with open_folder() as folder, FakeDoor(folder / "run", []) as door:
        (door.run_dir / "runtime.sock").chmod(0o600)
        done = hook(door.run_dir, '{"pid": 1}', "bind", "a1", before=as_user(12345, 12345))
    assert done.returncode == 1
    assert "uid 12345 may not open" in done.stderr and "(E201)" in done.stderr
    assert "[runtime] users = true" in done.stderr


def test_the_hook_end_restores_the_bundle_and_never_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("edited")
    (tmp_path / "config.json.vgpud-original").write_text("original")
    done = hook(tmp_path / "no-vgpud", json.dumps({"bundle": str(tmp_path)}), "end", "a1")
    assert done.returncode == 0
    assert [path.read_text() for path in tmp_path.iterdir()] == ["original"]


def test_the_hook_end_does_not_wait_for_a_daemon_that_is_down(tmp_path: Path) -> None:
    """systemd holds the socket open while the daemon is down. The hook's limit of 60 s applies only to calls
    that need an answer, so an end does not wait.
    """
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(tmp_path / "runtime.sock"))
        held.listen()
        begun = time.monotonic()
        done = hook(tmp_path, "{}", "end", "a1")
        assert time.monotonic() - begun < 50
    assert done.returncode == 0


def test_the_precreate_hook_edits_the_config_on_its_input(tmp_path: Path) -> None:
    asks = '{"process": {"env": ["VGPU_MEMORY=1GiB"]}}'
    with FakeDoor(tmp_path / "run", [(Status.DONE, b'{"edited": 1}')]) as door:
        assert hook(door.run_dir, asks, "precreate").stdout == '{"edited": 1}'
    (heard,) = door.heard
    assert (heard.verb, heard.flags, heard.body.decode()) == (1, 1, asks)
    plain = '{"process": {"env": []}}'
    assert hook(tmp_path / "no-vgpud", plain, "precreate").stdout == plain
    with FakeDoor(tmp_path / "run", [(Status.REFUSED, b"no (E401)")]) as door:
        refused = hook(door.run_dir, asks, "precreate")
    assert (refused.returncode, refused.stdout) == (1, "") and "E401" in refused.stderr


@pytest.mark.parametrize("words", [(), ("--what", "bind"), ("bind",), ("bind", "a", "b"), ("dance", "a1")])
def test_vgpu_hook_reports_a_wrong_command_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = hook(tmp_path, "{}", *words)
    assert done.returncode != 0 and done.stderr.startswith("vgpu-hook: ")


@pytest.mark.parametrize("config", [None, "", "[]", '{"root": 1}', '{"root": {"path": ""}}'])
def test_a_container_whose_root_cannot_be_found_does_not_start(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for state in ("{}", json.dumps({"bundle": str(tmp_path)})):
        done = hook(tmp_path, state, "container", "--preload=/nothing")
        assert done.returncode == 1 and "the container's root cannot be found" in done.stderr


def test_the_hook_reports_an_input_that_is_empty_or_cannot_be_read(tmp_path: Path) -> None:
    empty = hook(tmp_path, "", "precreate")
    assert (empty.returncode, empty.stdout) == (1, "")
    assert "there is no config.json on standard input" in empty.stderr
    folder = os.open(tmp_path, os.O_RDONLY)
    done = subprocess.run([HOOK, "precreate"], stdin=folder, capture_output=True, text=True, check=False)
    os.close(folder)
    assert done.returncode == 1 and "what the runtime says cannot be read" in done.stderr


def test_the_hook_refuse_reports_its_text_and_the_container_does_not_start(tmp_path: Path) -> None:
    done = hook(tmp_path, "{}", "refuse", "it is gone (E301)")
    assert (done.returncode, done.stderr) == (1, "vgpu-hook: it is gone (E301)\n")


@pytest.mark.parametrize("spaced", [None, 1])
def test_a_container_of_two_allocations_does_not_start(tmp_path: Path, spaced: int | None) -> None:
    """The environment variables of two allocations contradict each other, and one allocation could not be
    used.
    """
    (tmp_path / "root").mkdir()

    def start(*env: str) -> subprocess.CompletedProcess[str]:
        config = {"process": {"env": [*env]}, "root": {"path": "root"}}
        (tmp_path / "config.json").write_text(json.dumps(config, indent=spaced))
        state = json.dumps({"bundle": str(tmp_path)})
        return hook(tmp_path / "no-vgpud", state, "container", "--allocation=a1")

    long = "X=" + "x" * 10_000
    for env in ([], ["VGPU_ALLOCATION=a1"], [long, 'A=[{"', "VGPU_ALLOCATION=a2", "VGPU_ALLOCATION=a1"]):
        assert start(*env).returncode == 0, env
    refused = start(long, "VGPU_ALLOCATION=a1", "VGPU_ALLOCATION=a2", "PATH=/bin")
    assert refused.returncode == 1
    assert "given two allocations, a1 and a2" in refused.stderr and "E103" in refused.stderr


# --- json_text.c, compared with Python's json


@pytest.fixture(scope="module")
def member() -> Callable[[str, str], str | None]:
    """Returns a function that reads the string at a key of a JSON text, as the C code does."""
    read = ctypes.CDLL(str(TEST_BUILD / "libjson_text.so"))
    read.vgpu_json_member.restype = ctypes.c_void_p
    read.vgpu_json_member.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    read.vgpu_json_string.restype = ctypes.c_long
    read.vgpu_json_string.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]

    def ask(text: str, key: str) -> str | None:
        held = ctypes.create_string_buffer(text.encode())
        found = read.vgpu_json_member(ctypes.cast(held, ctypes.c_char_p), key.encode())
        room = ctypes.create_string_buffer(4096)
        if not found or read.vgpu_json_string(found, room, len(room)) < 0:
            return None
        return room.value.decode()

    return ask


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(150))
@given(st.dictionaries(TEXTS, VALUES, max_size=5), TEXTS, TEXTS, st.booleans(), st.sampled_from([None, 1]))
def test_the_parser_of_the_hook_reads_json_as_python_does(
    member: Callable[[str, str], str | None],
    rest: dict[str, Any],
    key: str,
    value: str,
    ascii_only: bool,
    indent: int | None,
) -> None:
    text = json.dumps({**rest, key: value}, ensure_ascii=ascii_only, indent=indent)
    assert member(text, key) == value
    for name, other in rest.items():
        if name != key:
            assert member(text, name) == (other if isinstance(other, str) else None)


@settings(max_examples=examples(150))
@given(st.text('{}[]":,\\ u0aé', max_size=40))
def test_the_parser_of_the_hook_refuses_invalid_json_without_a_crash(
    member: Callable[[str, str], str | None], text: str
) -> None:
    found = member(text, "a")
    assert found is None or isinstance(found, str)

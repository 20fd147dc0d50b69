"""Files named on the command line of vgpuctl. Whatever they contain, the answer is quick and an error has a
hint.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import prepared
from tests.ctl.conftest import Ctl, Done, environment
from tests.ctl.daemon import Daemon

VERBS = ["alloc -f", "plan -f", "policy test", "convert hami", "mig import"]


@pytest.fixture
def ask(daemon: Daemon) -> Callable[[str], Done]:
    """Runs vgpuctl in a process of its own, because a file without an end could block it."""

    def run(line: str) -> Done:
        process = prepared.ctl(line.split(), environment(daemon.socket))
        said, errors = process.communicate(timeout=300)
        return Done(line, process.wait(), said, errors)

    return run


def refused(done: Done, said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "(E103)\n" in done.stderr
    assert "\nhint: " in done.stderr
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("verb", VERBS)
def test_only_regular_files_are_read(ask: Callable[[str], Done], tmp_path: Path, verb: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in ("/dev/zero", fifo, tmp_path):
        refused(ask(f"{verb} {path}"), "is not a regular file")


@pytest.mark.parametrize("verb", VERBS)
def test_large_files_are_refused(main: Ctl, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"#" * (1024**2 + 1))
    refused(main(*verb.split(), str(path)), " is larger than ")


@pytest.mark.parametrize("verb", VERBS)
def test_files_that_are_not_utf8_are_refused(main: Ctl, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"a = '\xe4'")
    refused(main(*verb.split(), str(path)), "byte 5 (0xe4) is not UTF-8")


@pytest.mark.parametrize("verb", ["alloc -f", "plan -f", "policy test"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a." * 20_000 + "a = 1", "nested more than 32 levels deep"),
        ("memory = " + "[" * 20_000, "nested more than 32 levels deep"),
        ("a = " + "{a=" * 20_000, "nested more than 32 levels deep"),
        ("cores = " + "9" * 5000, "a number has more than 4300 digits"),
    ],
    ids=["dots", "arrays", "tables", "digits"],
)
def test_toml_with_deep_nesting_or_long_numbers_is_refused(
    ask: Callable[[str], Done], tmp_path: Path, verb: str, text: str, said: str
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    refused(ask(f"{verb} {path}"), said)


def test_a_number_too_long_for_its_option_is_refused(main: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "request.toml"
    path.write_text("cores = 0x" + "f" * 5000)
    refused(main("alloc", "-f", str(path)), "cores: ")


@pytest.mark.parametrize("depth", [100, 300, 5000])
def test_manifests_with_deep_nesting_are_refused(main: Ctl, tmp_path: Path, depth: int) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * depth + "]" * depth)
    done = main("convert", "hami", str(path))
    if done.returncode:
        refused(done, "has too many levels of lists and tables")
    else:
        assert depth < 5000


def test_a_request_file_may_have_a_byte_order_mark(main: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "request.toml"
    path.write_text("\ufefflabel = 'mine'\n")
    assert main("alloc", "-f", str(path)).returncode == 0
    assert daemon.requests("Allocate")[0].label == "mine"

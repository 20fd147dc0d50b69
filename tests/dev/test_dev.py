"""The program ./dev: its help, and its answers to a user that lacks packages and is not root."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.otheruser import as_user

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
VERBS = ("shell", "demo", "test", "lint", "bench", "build", "deb", "clean")


def dev(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*words], env={**os.environ, **changes}, capture_output=True, text=True, timeout=300, check=False
    )


def test_dev_without_a_verb_lists_the_verbs() -> None:
    done = dev(str(ROOT / "dev"))
    assert done.returncode == 0
    assert [verb for verb in VERBS if f"\n  {verb} " not in done.stdout] == []


def test_an_unknown_verb_is_refused() -> None:
    done = dev(str(ROOT / "dev"), "frobnicate")
    assert done.returncode == 1
    assert "unknown verb 'frobnicate'" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("clean now", "clean takes no arguments"),
        ("test --explore soon", "--explore takes a number of minutes above 0, not 'soon'"),
        ("test --explore 0", "--explore takes a number of minutes above 0, not '0'"),
        ("test --explore", "--explore takes a number of minutes above 0, not ''"),
        ("test --driver 999", "no simulated driver is of branch '999'"),
        ("test tests/none::test_x -n 2", "there is no tests/none"),
        ("cluster-test --kubernetes /none", "there is no folder '/none'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_built(tmp_path: Path, words: str, says: str) -> None:
    copy = str(shutil.copy(ROOT / "dev", tmp_path))
    done = dev(copy, *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == f"./dev: {says}"
    assert list(tmp_path.iterdir()) == [Path(copy)]


@pytest.mark.parametrize("verb", ["clean", "test", "coverage", "gpu-bench"])
def test_help_of_a_verb_lists_the_verbs_and_does_nothing_else(tmp_path: Path, verb: str) -> None:
    copy = str(shutil.copy(ROOT / "dev", tmp_path))
    (tmp_path / "build").mkdir()
    done = dev(copy, verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ./dev VERB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "dev"]


@needs("root")
def test_a_user_without_root_gets_the_command_that_installs_missing_packages(tmp_path: Path) -> None:
    """On this machine the tools that ./dev itself needs are there, and gcc is not."""
    for name in ("bash", "sh", "env", "readlink", "dirname", "tr", "id", "mkdir", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "apt-get").chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    copy = tmp_path / "tree"
    copy.mkdir(mode=0o777)
    copy.chmod(0o777)
    shutil.copy(ROOT / "dev", copy / "dev")
    done = dev(*as_user(NOBODY, NOBODY), str(copy / "dev"), "build", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "hint: run: sudo apt-get install -y" in done.stderr
    hint = done.stderr.split("install -y", 1)[1].split()
    assert "gcc" in hint
    assert "cmake" in hint

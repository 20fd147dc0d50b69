"""Tests of the test harness itself, on small suites: conditions, tiers, and the report of the summary."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import CONDITIONS, packages, table
from tests.simnode import ROOT

SUITE = """
import signal, subprocess, sys
import pytest
from tests.conditions import CONDITIONS, Condition, needs, unmet

CONDITIONS["moon"] = Condition("look at it", "wait", look=lambda: "it is day")
CONDITIONS["rocket"] = Condition("fly", "build it", real=True)

@needs("moon")
def test_moon(): raise AssertionError("was run")
@needs("rocket")
def test_rocket(): unmet("rocket", "no fuel")
def test_undeclared(): unmet("rocket", "no fuel")
def test_plain_skip(): pytest.skip("not today")
@pytest.mark.skip
def test_marked_skip(): pass
@pytest.mark.xfail
def test_xfail(): assert False
def test_signals():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"True\\n"
"""


def play(folder: Path, *words: str, before: str = "") -> str:
    (folder / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA"]
    options = [f"--rootdir={folder}", "-c", str(ROOT / "pyproject.toml"), *words, str(folder)]
    done = subprocess.run(
        ["sh", "-c", f'{before} exec "$@"', "sh", *command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a test run whose parent process ignores signals."""
    return play(tmp_path_factory.mktemp("suite"), before="trap '' INT PIPE;")


def test_a_test_that_skips_without_a_condition_of_the_suite_fails(said: str) -> None:
    assert "2 failed, 1 passed, 2 skipped, 1 xfailed, 1 error" in said
    assert "skipped without a condition of tests/conditions.py: Skipped: not today" in said
    assert 'needs("rocket") is missing on this test, which was skipped: Skipped: rocket: no fuel' in said
    assert "not tested here: 2 tests for want of moon 1, rocket 1; docs/testing.md says how" in said


def test_programs_of_tests_do_not_inherit_ignored_signals(said: str) -> None:
    assert "PASSED" in next(line for line in said.splitlines() if "test_signals" in line)


def test_the_first_tier_reports_the_tests_that_it_excludes(tmp_path: Path) -> None:
    """The workers count the tests, and the process that started them prints the numbers."""
    told = play(tmp_path, "-n", "2", "-m", "not real", "-k", "rocket or moon")
    assert "not tested here: 1 tests of real programs (rocket 1); ./dev test-all runs them" in told
    assert "1 skipped" in told


def test_the_table_of_conditions_in_testing_md_equals_the_code() -> None:
    assert table() in (ROOT / "docs" / "testing.md").read_text()
    assert [name for name, one in CONDITIONS.items() if not (one.how or one.packages)] == []


def test_only_packages_of_programs_that_are_not_installed_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conditions.PATH", "/nowhere")
    assert {"podman", "slurmd", "lintian"} <= set(packages())
    monkeypatch.setattr("tests.conditions.shutil.which", lambda name, path=None: f"/usr/bin/{name}")
    assert packages() == []

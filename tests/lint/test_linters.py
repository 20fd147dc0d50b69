"""The linters are tests: what they refuse does not land."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_check() -> None:
    assert_clean(run(sys.executable, "-m", "ruff", "check", "."))


def test_ruff_format() -> None:
    assert_clean(run(sys.executable, "-m", "ruff", "format", "--check", "."))


def test_mypy_strict() -> None:
    assert_clean(run(sys.executable, "-m", "mypy"))


def test_shell_scripts() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    slurm = [f"configs/slurm/{name}" for name in ("prolog", "task-prolog", "epilog", "vgpud-slurm.sh")]
    assert_clean(run(shellcheck, "-x", "dev", ".ci/run", *slurm))

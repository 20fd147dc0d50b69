"""The linters run as tests, so code with findings is not merged."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent


def committed() -> list[Path]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba|da)?sh\b", file.readline(100)) is not None


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
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
    scripts = [path for path in committed() if path.suffix == ".sh" or is_shell(path)]
    assert len(scripts) > 10
    assert_clean(run(TOOLS / "shellcheck", "-x", *scripts))


def test_c_format() -> None:
    sources = [path for path in committed() if path.suffix in (".c", ".h")]
    assert len(sources) > 100
    assert_clean(run(TOOLS / "clang-format", "--dry-run", "-Werror", *sources))

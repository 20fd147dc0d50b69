"""The official Python client, fetched once into build/outside/ from the index that this system's pip uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.simnode import ROOT

HOME = ROOT / "build" / "outside" / "kubernetes"
REQUIREMENT = "kubernetes>=34,<38"  # as pyproject.toml's extra "dra" has it
FETCH_SECONDS = 240

why = ""


def client() -> Path | None:
    """A folder for PYTHONPATH; None, with the reason in `why`, where it cannot be fetched."""
    if (HOME / "kubernetes" / "client").is_dir():
        return HOME
    HOME.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="kubernetes.", dir=HOME.parent))  # of this worker alone
    try:
        return _fetch(draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fetch(draft: Path) -> Path | None:
    global why  # noqa: PLW0603 - the reason of a skip
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(draft / "new")]
    try:
        done = subprocess.run(
            [*pip, REQUIREMENT], capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        why = f"pip did not fetch {REQUIREMENT} within {FETCH_SECONDS} s"
        return None
    if done.returncode != 0:
        why = f"pip cannot fetch {REQUIREMENT}: {(done.stderr.strip().splitlines() or ['no words'])[-1]}"
        return None
    with suppress(OSError):  # another worker was faster
        (draft / "new").rename(HOME)
    return HOME

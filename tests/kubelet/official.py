"""The official Python client, fetched once into build/outside/ from the index that pip uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.simnode import ROOT

HOME = ROOT / "build" / "outside" / "kubernetes"
REQUIREMENT = "kubernetes>=34,<38"  # the same requirement as in the extra "dra" of pyproject.toml
FETCH_SECONDS = 240

why = ""


def client() -> Path | None:
    """Returns a folder for PYTHONPATH with the official client. If the client cannot be fetched, returns
    None, and the reason is in `why`.
    """
    if (HOME / "kubernetes" / "client").is_dir():
        return HOME
    HOME.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="kubernetes.", dir=HOME.parent))  # a folder of this test worker
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
    with suppress(OSError):  # another test worker has already moved its folder to this name
        (draft / "new").rename(HOME)
    return HOME

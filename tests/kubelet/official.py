"""The official Python client, fetched once into build/outside/ from the index that this system's pip uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.simnode import ROOT

HOME = ROOT / "build" / "outside" / "kubernetes"
REQUIREMENT = "kubernetes>=34,<38"  # as pyproject.toml's extra "dra" has it
FETCH_SECONDS = 240

why = ""


def client() -> Path | None:
    """A folder for PYTHONPATH; None, with the reason in `why`, where it cannot be fetched."""
    global why  # noqa: PLW0603 - the reason of a skip
    if (HOME / "kubernetes" / "client").is_dir():
        return HOME
    draft = HOME.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(draft)]
    try:
        done = subprocess.run(
            [*pip, REQUIREMENT], capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        why = f"pip did not fetch {REQUIREMENT} within {FETCH_SECONDS} s"
        return None
    if done.returncode != 0:
        why = f"pip cannot fetch {REQUIREMENT}: {done.stderr.strip().splitlines()[-1:]}"
        return None
    try:
        draft.rename(HOME)
    except OSError:  # another worker was faster
        shutil.rmtree(draft, ignore_errors=True)
    return HOME

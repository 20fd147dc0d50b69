"""Fetches the official Python client and Helm 4 (as a C library) once, into build/outside/, from the package
index that pip uses.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.simnode import ROOT

OUTSIDE = ROOT / "build" / "outside"
REQUIREMENT = "kubernetes>=34,<38"  # the same requirement as in the extra "dra" of pyproject.toml
HELM = "helm-sdkpy==0.1.32"  # for x86-64; the library needs no Python, although the package asks for 3.12
HELM_OPTIONS = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python")
FETCH_SECONDS = 240

why = ""


def client() -> Path | None:
    """Returns a folder for PYTHONPATH with the official client. If the client cannot be fetched, returns
    None, and the reason is in `why`.
    """
    return _kept("kubernetes", "kubernetes/client", REQUIREMENT)


def helm() -> Path | None:
    """Returns the library libhelm_sdkpy.so. If it cannot be fetched, returns None, and the reason is in
    `why`.
    """
    folder = _kept("helm", "helm_sdkpy", HELM, *HELM_OPTIONS)
    return folder and folder / "helm_sdkpy" / "_lib" / "linux-amd64" / "libhelm_sdkpy.so"


def _kept(name: str, within: str, requirement: str, *options: str) -> Path | None:
    home = OUTSIDE / name
    if (home / within).is_dir():
        return home
    OUTSIDE.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=OUTSIDE))  # a folder of this test worker
    try:
        return home if _fetch(draft, home, requirement, *options) else None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fetch(draft: Path, home: Path, requirement: str, *options: str) -> bool:
    global why  # noqa: PLW0603 - the reason of a skip
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", *options, "--target"]
    try:
        done = subprocess.run(
            [*pip, str(draft / "new"), requirement],
            capture_output=True,
            text=True,
            check=False,
            timeout=FETCH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        why = f"pip did not fetch {requirement} within {FETCH_SECONDS} s"
        return False
    if done.returncode != 0:
        why = f"pip cannot fetch {requirement}: {(done.stderr.strip().splitlines() or ['no words'])[-1]}"
        return False
    with suppress(OSError):  # another test worker has already moved its folder to this name
        (draft / "new").rename(home)
    return True

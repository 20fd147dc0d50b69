"""Programs of other projects, fetched once into build/outside/ and never committed.

`nvidia_smi(branch)`, `mps(branch)`, `promtool()` and `unpacked(package, suite)` come from the Debian archive
that this system's own apt uses; `python_tools()` and `zig()` from the index that this system's own pip uses.
Each returns None when its registry cannot be reached, and the caller skips with the reason from `why`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.simnode import ROOT

OUTSIDE = ROOT / "build" / "outside"
# Driver branch, and the Debian suite that has its programs.
SUITES = {"535": "bookworm", "550": "trixie"}
PYTHON_TOOLS = ("nvitop", "gpustat", "nvidia-ml-py")
FETCH_SECONDS = 180

# Folder of build/outside/, and why it could not be fetched.
why: dict[str, str] = {}


def _deb822_uris(text: str) -> list[str]:
    return [line.split(None, 1)[1].split()[0] for line in text.splitlines() if line.startswith("URIs:")]


def _one_line_uris(text: str) -> list[str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("deb ")]
    return [word for words in lines for word in words if "://" in word]


def archive() -> str | None:
    """The archive that apt is configured to use here; None if it is not Debian's."""
    etc = Path("/etc/apt")
    found: list[str] = []
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        found += _deb822_uris(path.read_text())
    for path in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
        if path.exists():
            found += _one_line_uris(path.read_text())
    debian = [uri for uri in found if uri.rstrip("/").endswith("/debian")]
    return debian[0] if debian else None


def run(words: list[str], cwd: Path) -> str:
    """Runs a program that downloads something. Returns the last line of its error output, or "" if it
    succeeds.
    """
    try:
        done = subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} did not end within {FETCH_SECONDS} s"
    return (done.stderr.strip().splitlines() or [f"{words[0]} failed"])[-1] if done.returncode else ""


def once(target: Path, fill: Callable[[Path], str]) -> Path | None:
    """Returns the folder `target`, which `fill(draft)` fills once, however many tests ask at the same time.

    If `fill` fails, it returns the reason. Then `once` returns None, and `why[target.name]` has the reason.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            draft = Path(scratch) / target.name
            draft.mkdir()
            if reason := fill(draft):
                why[target.name] = reason
                return None
            draft.rename(target)
    return target


def _download(package: str, suite: str, component: str, uri: str, work: Path) -> str:
    """Runs apt-get download with its own sources, lists and cache, so those of the system do not
    change.
    """
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (work / name).mkdir(parents=True)
    (work / "list").write_text(f"deb {uri} {suite} {component}\n")
    options = {
        "Dir::Etc::SourceList": work / "list",
        "Dir::Etc::SourceParts": work / "parts",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
    }
    words = ["apt-get", "-qq", *(w for k, v in options.items() for w in ("-o", f"{k}={v}"))]
    return run([*words, "update"], work) or run([*words, "download", package], work)


def _unpacked(package: str, suite: str, component: str, work: Path, draft: Path) -> str:
    """Unpacks a Debian package into the folder `draft`. Returns the reason of a failure, or ""."""
    uri = archive()
    if uri is None or shutil.which("apt-get") is None or os.uname().machine != "x86_64":
        return "apt knows no Debian archive for x86-64 here"
    if reason := _download(package, suite, component, uri, work):
        return reason
    (deb,) = work.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(deb), str(draft)], check=True)
    return ""


def _from_debian(package: str, suite: str, component: str, programs: tuple[str, ...], draft: Path) -> str:
    """Extracts programs of a Debian package into the folder `draft`. Returns the reason of a failure,
    or "".
    """
    work = draft.parent / "apt"
    if reason := _unpacked(package, suite, component, work, work / "x"):
        return reason
    for name in programs:
        (program,) = [p for p in (work / "x").rglob(name) if p.is_file() and os.access(p, os.X_OK)]
        program.rename(draft / name)
    return ""


def _from_pip(packages: tuple[str, ...], draft: Path) -> str:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    return run([*pip, "--target", str(draft), *packages], ROOT)


def nvidia_smi(branch: str) -> Path | None:
    """The path of NVIDIA's nvidia-smi of a driver branch."""
    package = ("nvidia-smi", SUITES[branch], "non-free", ("nvidia-smi",))
    folder = once(OUTSIDE / f"smi-{branch}", lambda draft: _from_debian(*package, draft))
    return folder and folder / "nvidia-smi"


def mps(branch: str) -> Path | None:
    """A folder with NVIDIA's MPS control daemon and server of a driver branch."""
    programs = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
    package = ("nvidia-cuda-mps", SUITES[branch], "non-free", programs)
    return once(OUTSIDE / f"mps-{branch}", lambda draft: _from_debian(*package, draft))


def promtool() -> Path | None:
    """The path of promtool, which checks rules, rule tests and metrics for Prometheus."""
    if installed := shutil.which("promtool"):
        return Path(installed)
    package = ("prometheus", "bookworm", "main", ("promtool",))
    folder = once(OUTSIDE / "prometheus", lambda draft: _from_debian(*package, draft))
    return folder and folder / "promtool"


def unpacked(package: str, suite: str) -> Path | None:
    """The folder with the files of a package of a Debian suite. The package is unpacked and not installed."""
    folder = OUTSIDE / f"{package}-{suite}"
    return once(
        folder, lambda draft: _unpacked(package, suite, "main", draft.parent / f"apt-{package}", draft)
    )


def python_tools() -> Path | None:
    """A folder for PYTHONPATH that contains nvitop, gpustat and nvidia-ml-py."""
    return once(OUTSIDE / "python-tools", lambda draft: _from_pip(PYTHON_TOOLS, draft))


def zig() -> Path | None:
    """A folder for PYTHONPATH that contains Zig."""
    return once(OUTSIDE / "zig", lambda draft: _from_pip(("ziglang",), draft))

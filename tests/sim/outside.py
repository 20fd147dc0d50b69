"""Programs that we did not write, fetched once into build/outside/ and never committed.

`nvidia_smi(branch)` and `promtool()` come from the Debian archive that this system's own apt uses;
`python_tools()` from the index that this system's own pip uses. Each returns None when its registry cannot be
reached, and the caller skips with the reason that `why` holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simnode import ROOT

OUTSIDE = ROOT / "build" / "outside"
#: Branch of the driver -> the Debian suite that carries its nvidia-smi.
SUITES = {"535": "bookworm", "550": "trixie"}
PYTHON_TOOLS = ("nvitop", "gpustat", "nvidia-ml-py")
FETCH_SECONDS = 180

why: dict[str, str] = {}


def _deb822_uris(text: str) -> list[str]:
    return [line.split(None, 1)[1].split()[0] for line in text.splitlines() if line.startswith("URIs:")]


def _one_line_uris(text: str) -> list[str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("deb ")]
    return [word for words in lines for word in words if "://" in word]


def archive() -> str | None:
    """The distribution's archive, as apt is configured here; None when it is not Debian's."""
    etc = Path("/etc/apt")
    found: list[str] = []
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        found += _deb822_uris(path.read_text())
    for path in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
        if path.exists():
            found += _one_line_uris(path.read_text())
    debian = [uri for uri in found if uri.rstrip("/").endswith("/debian")]
    return debian[0] if debian else None


def _run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS)


def _download(package: str, suite: str, component: str, uri: str, work: Path) -> Path | None:
    """apt-get download with a sources list, lists and cache of its own: the system's stay as they are."""
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
    }
    words = ["apt-get", "-qq", *(w for k, v in options.items() for w in ("-o", f"{k}={v}"))]
    for verb in (["update"], ["download", package]):
        done = _run([*words, *verb], work)
        if done.returncode != 0:
            why[package] = (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]
            return None
    return next(iter(work.glob(f"{package}_*.deb")), None)


def _program(target: Path, package: str, suite: str, component: str) -> Path | None:
    """The program of target's name out of a package of Debian's."""
    if target.exists():
        return target
    uri = archive()
    if uri is None or shutil.which("apt-get") is None or os.uname().machine != "x86_64":
        why[package] = "apt knows no Debian archive for x86-64 here"
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        work = Path(scratch)
        try:
            deb = _download(package, suite, component, uri, work)
        except subprocess.TimeoutExpired:
            why[package] = f"apt-get did not end within {FETCH_SECONDS} s"
            return None
        if deb is None:
            return None
        subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "x")], check=True)
        (program,) = [p for p in (work / "x").rglob(target.name) if p.is_file() and os.access(p, os.X_OK)]
        program.rename(target)  # in one step, however many tests fetch it at once
    return target


def nvidia_smi(branch: str) -> Path | None:
    """The real nvidia-smi of a driver branch."""
    return _program(OUTSIDE / "smi" / branch / "nvidia-smi", "nvidia-smi", SUITES[branch], "non-free")


def promtool() -> Path | None:
    """Prometheus' own judge of rules, of their tests, and of what is scraped."""
    installed = shutil.which("promtool")
    return Path(installed) if installed else _program(OUTSIDE / "promtool", "prometheus", "bookworm", "main")


def python_tools() -> Path | None:
    """A folder for PYTHONPATH that holds nvitop, gpustat and nvidia-ml-py."""
    target = OUTSIDE / "python-tools"
    if (target / "nvitop").exists() and (target / "gpustat").exists():
        return target
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    new = target.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    done = _run([*pip, "--target", str(new), *PYTHON_TOOLS], ROOT)
    if done.returncode != 0:
        why["python-tools"] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        return None
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
    return target

"""Builds the packages once for each state of the source tree, and the same packages as a later version."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.packaging.tools import WORK
from tests.simnode import ROOT

NAMES = ("vgpud", "libvgpu", "vgpud-sim")
_INPUTS = ("packaging", "systemd", "configs", "native", "vgpud", "docs", "pyproject.toml", "README.md")
BUILD_SECONDS = 900


def _digest() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name in _INPUTS:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not {"__pycache__", "gen"} & set(path.parts):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build() -> Path:
    """The folder with the packages of this source tree."""
    out = WORK / "debs"
    stamp = out / "of"
    wanted = _digest()
    if stamp.exists() and stamp.read_text() == wanted:
        return out
    script = ROOT / "packaging" / "deb" / "build.py"
    # a build without Zig; tests/native/test_portable.py tests the build for old C libraries
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(out), "--system-compiler"],
        env={**os.environ, "DEB_BUILD_OPTIONS": "noautodbgsym"},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stamp.write_text(wanted)
    return out


def version(debs: Path) -> str:
    return field(one(debs, "vgpud"), "Version")


def one(debs: Path, name: str) -> Path:
    (found,) = debs.glob(f"{name}_*.deb")
    return found


def field(deb: Path, name: str) -> str:
    done = subprocess.run(["dpkg-deb", "-f", str(deb), name], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def files(deb: Path) -> dict[str, str]:
    """The permissions of each path as `dpkg-deb -c` lists them. Links are listed with their target."""
    done = subprocess.run(["dpkg-deb", "-c", str(deb)], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=5) for line in done.stdout.splitlines()]
    return {words[5].removeprefix("."): words[0] for words in lines}


def as_later(debs: Path, folder: Path) -> str:
    """Makes the same packages with a later version number in `folder`. Returns the number."""
    old = version(debs)
    new = f"{old}+1"
    folder.mkdir()
    for name in NAMES:
        tree = folder / "tree"
        subprocess.run(["dpkg-deb", "-R", str(one(debs, name)), str(tree)], check=True)
        control = tree / "DEBIAN" / "control"
        control.write_text(
            control.read_text()
            .replace(f"Version: {old}\n", f"Version: {new}\n")
            .replace(f"(= {old})", f"(= {new})")
        )
        for versioned in tree.glob(f"usr/lib/*/vgpud/{old}"):
            for link in [path for path in versioned.parent.iterdir() if path.is_symlink()]:
                link.unlink()
                link.symlink_to(f"{new}/{link.name}")
            versioned.rename(versioned.with_name(new))
            (tree / "DEBIAN" / "md5sums").unlink()
        command = ["dpkg-deb", "--root-owner-group", "-Znone", "-b", str(tree), str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        shutil.rmtree(tree)
    return new

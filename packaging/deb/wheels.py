"""The wheels of what vgpud runs with, and of nothing else: `python packaging/deb/wheels.py --out FOLDER`.

packaging/requirements.lock pins and hashes everything that is installed for development. What vgpud itself
needs is the closure of pyproject.toml's dependencies, as the metadata of this very environment tell it. pip
checks each hash; a source distribution (systemd-python has no wheel) is compiled here.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==")


def closure(wanted: Iterable[str]) -> set[str]:
    """Canonical names of the requirements and of all that they require here, extras too."""
    found: set[str] = set()
    queue = [Requirement(text) for text in wanted]
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in requires(name) or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append(needed)
    return found


def entries(lock: str, names: set[str]) -> str:
    """The lock's entries of these names, hashes and all; raises ValueError for a name it does not have."""
    taken: list[str] = []
    had: set[str] = set()
    keep = False
    for line in lock.splitlines(keepends=True):
        match = _ENTRY.match(line)
        if match is not None:
            name = canonicalize_name(match["name"])
            keep = name in names
            had |= {name} & names
        if keep:
            taken.append(line)
    if had != names:
        raise ValueError(f"requirements.lock lacks {', '.join(sorted(names - had))}")
    return "".join(taken)


def runtime_lock() -> str:
    """What to install: a part of packaging/requirements.lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "packaging" / "requirements.lock").read_text()
    return entries(lock, closure(project["dependencies"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    lock = runtime_lock()
    stamp = out / "stamp"
    wanted = hashlib.sha256(f"{sys.version_info[:2]}\n{lock}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    requirements = out / "runtime.lock"
    requirements.write_text(lock)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--use-pep517"]
    subprocess.run(
        [*pip, "--require-hashes", "--no-deps", "-r", str(requirements), "-w", str(out)], check=True
    )
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

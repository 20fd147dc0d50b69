"""Downloads the wheels of vgpud's run-time dependencies for every Python version that the package supports.

    wheels.py --out FOLDER [--machine MACHINE]     FOLDER/3.11/*.whl, and so on
    wheels.py --depends                            what the package depends on for them

packaging/requirements.lock pins and hashes everything that is installed for development. The run-time
dependencies are the closure of pyproject.toml's dependencies, by the metadata of the current environment. pip
checks each hash, and nothing is compiled: packages without a wheel come from the distribution
(FROM_THE_DISTRIBUTION).
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
#: Debian 12 has 3.11, Ubuntu 24.04 has 3.12, Debian 13 has 3.13. The versions are consecutive, because the
#: package depends on a range.
PYTHONS = ("3.11", "3.12", "3.13")
#: Python package -> Debian package, whose files serve every Python version of the distribution
FROM_THE_DISTRIBUTION = {"systemd-python": "python3-systemd"}
#: glibc versions of manylinux tags, the newest first: 2.36 is that of Debian 12, the oldest supported
#: distribution (PEP 600)
_GLIBC_MINORS = range(36, 16, -1)
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==")


def closure(wanted: Iterable[str]) -> set[str]:
    """Returns the canonical names of the requirements and of their transitive dependencies, extras included,
    for any of PYTHONS.
    """
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
            queue += [r for r in map(Requirement, requires(name) or ()) if _holds(r, extra)]
    return found


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or any(
        requirement.marker.evaluate(
            {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
        )
        for python in PYTHONS
    )


def entries(lock: str, names: set[str]) -> str:
    """Returns the lock file's entries for these names, with their hashes. Raises ValueError for a name that
    the lock file lacks.
    """
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
    """Returns the entries of packaging/requirements.lock that vgpud needs at run time, without the packages
    that come from the distribution (FROM_THE_DISTRIBUTION).
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "packaging" / "requirements.lock").read_text()
    return entries(lock, closure(project["dependencies"]) - set(FROM_THE_DISTRIBUTION))


def depends() -> str:
    """Returns the Depends field of debian/control: the Python versions, and the packages of
    FROM_THE_DISTRIBUTION.
    """
    first, last = PYTHONS[0], PYTHONS[-1]
    major, minor = map(int, last.split("."))
    pythons = f"python3 (>= {first}~), python3 (<< {major}.{minor + 1}~)"
    return ", ".join([pythons, *FROM_THE_DISTRIBUTION.values()])


def target(python: str, machine: str) -> list[str]:
    """Returns pip's options for another interpreter and machine. `machine` is uname's name."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS] + [f"manylinux2014_{machine}"]
    options = ["--implementation", "cp", "--python-version", python, "--only-binary", ":all:"]
    return [*options, *(word for platform in platforms for word in ("--platform", platform))]


def fetch(lock: str, out: Path, machine: str) -> None:
    """Downloads the wheels of `lock` into `out`; does nothing if `out` already has the wheels of the same
    lock.
    """
    out.mkdir(parents=True, exist_ok=True)
    stamp, wanted = out / "of", f"{machine} {PYTHONS}\n{lock}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    requirements = out / "runtime.lock"
    requirements.write_text(lock)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    for python in PYTHONS:
        folder = out / python
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        words = [*target(python, machine), "--require-hashes", "-r", str(requirements), "-d", str(folder)]
        subprocess.run([*pip, *words], check=True)
    stamp.write_text(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument("--depends", action="store_true")
    options = parser.parse_args()
    if options.depends:
        print(depends())
        return 0
    out: Path = options.out
    lock = runtime_lock()
    stamp = out / "stamp"
    wanted = hashlib.sha256(f"{PYTHONS} {options.machine}\n{lock}".encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        stamp.unlink(missing_ok=True)
        fetch(lock, out, options.machine)
        stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""vgpud's own Python environment, below a package's staging folder: run by debian/rules.

It holds what the wheels hold and no pip. One folder serves every Python that wheels.py names: a compiled
module is named for its Python, so they lie side by side, and of all else there is one. Programs other than
vgpud's own are left out, and those run isolated (-I): neither PYTHONPATH nor the folder that a root shell
stands in can put a module before theirs. The byte code of this Python is made here, for the daemon cannot
write below /usr; that of another when the package is installed (vgpud.postinst).
"""

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from wheels import FROM_THE_DISTRIBUTION, PYTHONS, target

_NOTES = {"direct_url.json", "REQUESTED", "INSTALLER"}
_SOURCES = {".pyx", ".pxd", ".c", ".h"}
# A package costs its install a sync for each file: of Google's API messages only google.rpc is needed.
_MESSAGES = {"protobuf", "rpc", "_upb"}
#: Where the distribution has modules for all of its Pythons; name of the Debian package -> what to take.
_DISTRIBUTION = Path("/usr/lib/python3/dist-packages")
_TAKEN = {"python3-systemd": "systemd"}


def unpack(python: str, machine: str, wheels: Iterable[Path], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-compile", "--no-warn-script-location", "--target", str(folder)]
    subprocess.run([*pip, *options, *target(python, machine), *map(str, wheels)], check=True)


def merge(folder: Path, into: Path) -> None:
    """Raises ValueError where two Pythons would need different modules of one name."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        there = into / name
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, there)
        elif not name.parts[0].endswith(".dist-info") and not filecmp.cmp(path, there, shallow=False):
            raise ValueError(f"{name} is not the same for all of Python {', '.join(PYTHONS)}")


def make(staging: Path, prefix: Path, wheels: Path, own: Path, machine: str) -> Path:
    """The environment at STAGING/PREFIX, as it will be at PREFIX; `own` is the folder of vgpud's wheel."""
    home = staging / prefix.relative_to("/")
    packages = home / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    had: set[str] = set()
    for python in PYTHONS:
        files = [
            path for path in [*(wheels / python).glob("*.whl"), *own.glob("*.whl")] if path.name not in had
        ]
        had |= {path.name for path in files}
        with tempfile.TemporaryDirectory() as scratch:
            unpack(python, machine, files, Path(scratch))
            merge(Path(scratch), packages)
        finder = home / "lib" / f"python{python}" / "site-packages"
        finder.mkdir(parents=True)
        (finder / "vgpud.pth").write_text(f"{os.path.relpath(packages, finder)}\n")
    for package in FROM_THE_DISTRIBUTION.values():
        (packages / _TAKEN[package]).symlink_to(_DISTRIBUTION / _TAKEN[package])
    return home


def settle(home: Path, prefix: Path) -> None:
    """Makes it one that lives at `prefix`, with the system's Python, whichever that is."""
    programs = home / "bin"
    (home / "lib" / "python3" / "site-packages" / "bin").rename(programs)
    for path in programs.iterdir():
        if path.name.startswith("vgpu"):
            path.write_text(re.sub(r"\A#!.*\n", f"#!{prefix}/bin/python3 -I\n", path.read_text()))
        else:
            path.unlink()
    (programs / "python3").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")


def tidy(home: Path) -> None:
    """Without what only a developer reads, and what pip notes of where things came from."""
    for path in home.rglob("*"):
        if path.name in _NOTES or path.suffix in _SOURCES:
            path.unlink()
    for path in [p for p in home.rglob("*") if p.is_dir() and p.name in ("test", "tests", "testdata")]:
        shutil.rmtree(path)
    packages = home / "lib" / "python3" / "site-packages"
    for path in (packages / "google").iterdir():
        if path.name not in _MESSAGES:
            shutil.rmtree(path)
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o755 if path.parent == home / "bin" else 0o644)


def compile_all(home: Path, staging: Path) -> None:
    options = ["-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(staging), "-p", "/"]
    subprocess.run([sys.executable, "-m", "compileall", *options, str(home / "lib")], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="what wheels.py has made")
    parser.add_argument("--own", type=Path, required=True, help="the folder of vgpud's own wheel")
    parser.add_argument("--machine", required=True, help="x86_64 or aarch64")
    parser.add_argument("--staging", type=Path, required=True, help="what becomes / of the package")
    parser.add_argument("--prefix", type=Path, required=True, help="where the environment lives")
    options = parser.parse_args()
    staging: Path = options.staging.resolve()
    home = make(staging, options.prefix, options.wheels, options.own, options.machine)
    settle(home, options.prefix)
    tidy(home)
    compile_all(home, staging)
    return 0


if __name__ == "__main__":
    sys.exit(main())

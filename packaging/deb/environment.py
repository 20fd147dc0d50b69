"""Makes vgpud's own Python environment below a package's staging folder; debian/rules runs this script.

The environment holds the contents of the wheels, without pip. One folder serves every Python version that
wheels.py names: the file name of a compiled module contains the version, so the modules of several versions
fit into one folder. Of the programs, only vgpud's own are kept. They run isolated (-I), so that neither
PYTHONPATH nor root's current folder can replace a module. The script compiles the byte code for the build's
Python version, because the daemon cannot write below /usr; vgpud.postinst compiles it for another version.
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
# the subpackages of Google's API messages that vgpud needs; the others are left out, because each file costs
# a sync at installation
_MESSAGES = {"protobuf", "rpc", "_upb"}
#: the folder of the distribution's modules for all of its Python versions, and the modules to link from it:
#: Debian package -> module's folder
_DISTRIBUTION = Path("/usr/lib/python3/dist-packages")
_TAKEN = {"python3-systemd": "systemd"}


def unpack(python: str, machine: str, wheels: Iterable[Path], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-compile", "--no-warn-script-location", "--target", str(folder)]
    subprocess.run([*pip, *options, *target(python, machine), *map(str, wheels)], check=True)


def merge(folder: Path, into: Path) -> None:
    """Copies the installed wheels of one Python version from `folder` into `into`, which may have those of
    other versions. Raises ValueError if both have a file with one name and different contents, except in
    *.dist-info.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        there = into / name
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, there)
        elif not name.parts[0].endswith(".dist-info") and not filecmp.cmp(path, there, shallow=False):
            raise ValueError(f"{name} is not the same for all of Python {', '.join(PYTHONS)}")


def make(staging: Path, prefix: Path, wheels: Path, own: Path, machine: str) -> Path:
    """Makes the environment at STAGING/PREFIX, to be installed at PREFIX. `own` is the folder with vgpud's
    wheel.
    """
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
    """Sets the environment's paths to `prefix`, and its interpreter to the system's Python."""
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
    """Removes what vgpud does not need at run time: sources, tests, pip's records of each package's origin,
    and unused subpackages of google. Then sets the modes of all files.
    """
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

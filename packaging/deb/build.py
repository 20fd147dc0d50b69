"""Builds the packages: `./dev deb` runs this with the tree's own Python.

    build.py [--out build/deb] [--system-compiler] [--arch amd64]

The script copies the tree to OUT/src with packaging/deb/debian at its top and runs dpkg-buildpackage there.
The packages are then in OUT. Zig compiles libvgpu.so for glibc 2.17, so that old containers can load it: the
loader only warns about a library that it cannot preload, and the tenant would run without limits. With
--system-compiler this system's C compiler compiles it, against this system's C library.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ZIG_LOCK = HERE / "zig.lock"
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "tests", "__pycache__", ".*_cache", ".hypothesis", "gen"
)
_LINES_SHOWN = 60
#: Debian's name of each architecture, and uname's name of it.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def copy_tree(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT, target, ignore=_LEFT_OUT, symlinks=True)
    shutil.copytree(HERE / "debian", target / "debian")


def zig(out: Path) -> str:
    """Returns the path of a Python that has ziglang, installed from zig.lock with pinned versions and
    hashes.
    """
    folder = out / "zig"
    wanted = ZIG_LOCK.read_text()
    stamp = folder / "lock"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--require-hashes", "-r", str(ZIG_LOCK), "--target", str(folder)])
        stamp.write_text(wanted)
    return f"env PYTHONPATH={folder} {sys.executable}"


def run(command: list[str], **options: object) -> None:
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


def own_architecture() -> str:
    words = ["dpkg", "--print-architecture"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def build(out: Path, architecture: str, system_compiler: bool) -> int:
    source, wheels, log = out / "src", out / "wheels", out / "build.log"
    run([sys.executable, str(HERE / "wheels.py"), "--out", str(wheels), "--machine", MACHINES[architecture]])
    copy_tree(source)
    for old in (*out.glob("vgpud*.*deb"), *out.glob("libvgpu*.*deb"), *(out / "debug").glob("*-dbgsym_*deb")):
        old.unlink()
    environment = {
        **os.environ,
        "VGPU_PYTHON": sys.executable,
        "VGPU_WHEELS": str(wheels),
        "VGPU_ZIG": "" if system_compiler else zig(out),
        # PATH with the system's tools only, without the tree's virtual environment
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    # -d: dpkg does not check Build-Depends, because ./dev installs them
    command = ["dpkg-buildpackage", "-b", "-us", "-uc", "-d", "-j2", f"--host-arch={architecture}"]
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=source, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        sys.stderr.write("\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]) + "\n")
        return 1
    # the debug symbols go to a separate folder, so that all *.deb in OUT are for installation
    symbols = out / "debug"
    symbols.mkdir(exist_ok=True)
    for path in out.glob("*-dbgsym_*deb"):
        path.replace(symbols / path.name)
    for path in sorted(out.glob("*.deb")):
        sys.stdout.write(f"{path}\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "deb")
    parser.add_argument("--system-compiler", action="store_true")
    parser.add_argument(
        "--arch", choices=MACHINES, default=own_architecture(), help="another than this one is cross-built"
    )
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    return build(out, options.arch, options.system_compiler)


if __name__ == "__main__":
    sys.exit(main())

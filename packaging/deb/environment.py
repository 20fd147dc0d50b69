"""vgpud's own Python environment, below a package's staging folder: run by debian/rules.

It holds what the wheels hold and no pip; its byte code is made here, for the daemon cannot write below /usr.
Programs other than vgpud's own are left out, and those run isolated (-I): neither PYTHONPATH nor the folder
that a root shell stands in can put a module before theirs.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

_NOTES = {"direct_url.json", "REQUESTED", "INSTALLER"}
_SOURCES = {".pyx", ".pxd", ".c", ".h", ".pyi", ".proto"}
# A package costs its install a sync for each file, and of these two vgpud uses a small part: what rich and
# structlog highlight is Python; of Google's API messages grpcio-status needs google.rpc.
_LEXERS = {"__init__.py", "_mapping.py", "python.py", "special.py"}
_MESSAGES = {"protobuf", "rpc", "_upb"}


def make(staging: Path, prefix: Path, wheels: list[Path]) -> Path:
    """The environment at STAGING/PREFIX, as it will be at PREFIX."""
    home = staging / prefix.relative_to("/")
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}"
    subprocess.run([str(base), "-m", "venv", "--without-pip", "--symlinks", str(home)], check=True)
    files = [str(path) for folder in wheels for path in sorted(folder.glob("*.whl"))]
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python3"), "install", "-q"]
    options = [
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-warn-script-location",
    ]
    subprocess.run([*pip, *options, *files], check=True)
    return home


def settle(home: Path, prefix: Path) -> None:
    """Makes it one that lives at `prefix`."""
    programs = home / "bin"
    for path in programs.iterdir():
        if not path.name.startswith(("vgpu", "python3")) or path.name.startswith("python3."):
            path.unlink()
        elif not path.is_symlink():
            text = path.read_text()
            path.write_text(re.sub(r"\A#!.*\n", f"#!{prefix}/bin/python3 -I\n", text))
    for name in ("include", "lib64"):
        path = home / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    for path in programs.glob("python3*"):
        path.unlink()
        path.symlink_to("/usr/bin/python3")
    configuration = home / "pyvenv.cfg"
    lines = configuration.read_text().splitlines()
    # the command names the folder that it was made in
    configuration.write_text("".join(f"{line}\n" for line in lines if not line.startswith("command")))


def tidy(home: Path) -> None:
    """Without what only a developer reads, and what pip notes of where things came from."""
    for path in home.rglob("*"):
        if path.name in ("direct_url.json", "REQUESTED", "INSTALLER") or path.suffix in (
            ".pyx",
            ".pxd",
            ".c",
            ".h",
        ):
            path.unlink()
    for path in [p for p in home.rglob("*") if p.is_dir() and p.name in ("test", "tests", "testdata")]:
        shutil.rmtree(path)
    (packages,) = home.glob("lib/python*/site-packages")
    for path in (packages / "pygments" / "lexers").iterdir():
        if path.name not in _LEXERS:
            path.unlink()
    for path in (packages / "google").iterdir():
        if path.name not in _MESSAGES:
            shutil.rmtree(path)
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o755 if path.parent == home / "bin" else 0o644)


def compile_all(home: Path, staging: Path) -> None:
    options = ["-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(staging), "-p", "/"]
    subprocess.run(
        [str(home / "bin" / "python3"), "-m", "compileall", *options, str(home / "lib")], check=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, nargs="+", required=True, help="folders of wheels")
    parser.add_argument("--staging", type=Path, required=True, help="what becomes / of the package")
    parser.add_argument("--prefix", type=Path, required=True, help="where the environment lives")
    options = parser.parse_args()
    staging: Path = options.staging.resolve()
    home = make(staging, options.prefix, options.wheels)
    settle(home, options.prefix)
    tidy(home)
    compile_all(home, staging)
    return 0


if __name__ == "__main__":
    sys.exit(main())

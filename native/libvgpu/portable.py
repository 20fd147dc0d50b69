"""Compiles libvgpu.so for containers with an old C library, or for another processor.

    portable.py --out FOLDER [--machine x86_64 | aarch64] [--glibc 2.17] [--include FOLDER ...]

Compiles with Zig's C compiler (`pip install ziglang`), which links against the symbol versions of any glibc
from 2.17 on. Then reads the result's own version table: a symbol newer than --glibc is an error.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import hooks

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=gnu11", "-O2", "-g", "-DNDEBUG", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-ftls-model=initial-exec"]
FLAGS += ["-fno-sanitize=all", "-Wall", "-Wextra"]
LINK = ["-shared", "-Wl,-soname,libvgpu.so", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,nodelete"]
LINK += ["-Wl,-Bsymbolic"]


def sources() -> list[Path]:
    own = [path for path in sorted(HERE.rglob("*.c")) if path.name != "hooks_doc.c"]
    common = HERE.parent / "common"
    return own + [path for path in sorted(common.glob("*.c")) if path.name != "layout.c"]


def versions(library: Path) -> set[tuple[int, ...]]:
    """Returns the glibc versions that a shared object requires."""
    done = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True)  # noqa: S607
    return {tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_([\d.]+)", done.stdout)}


def build(out: Path, machine: str, glibc: str, includes: list[Path]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    library = out / "libvgpu.so"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{glibc}"]
    with tempfile.TemporaryDirectory() as generated:
        made = Path(generated)
        hooks.generate(made, compiler, includes)
        command = [*compiler, *FLAGS, *(f"-isystem{folder}" for folder in includes)]
        folders = [
            *(folder for folder in sorted(HERE.iterdir()) if folder.is_dir()),
            made,
            HERE.parent / "common",
        ]
        command += [f"-iquote{folder}" for folder in folders]
        command += [*map(str, sources()), str(made / "waits.c")]
        subprocess.run([*command, *LINK, "-lpthread", "-ldl", "-o", str(library)], check=True)
    return library


def nvidia_headers() -> list[Path]:
    import nvidia  # type: ignore[import-untyped,unused-ignore]

    (root,) = (Path(folder) for folder in nvidia.__path__)
    return [root / "cu13" / "include", root / "nvml_dev" / "include"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default="x86_64")
    parser.add_argument("--glibc", default="2.17")
    parser.add_argument("--include", type=Path, action="append", help="where cuda.h and nvml.h are")
    options = parser.parse_args()
    library = build(options.out, options.machine, options.glibc, options.include or nvidia_headers())
    newest = max(versions(library), default=(0,))
    sys.stdout.write(f"{library}: asks for glibc {'.'.join(map(str, newest))}\n")
    return int(newest > tuple(map(int, options.glibc.split("."))))


if __name__ == "__main__":
    sys.exit(main())

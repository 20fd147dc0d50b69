"""Generates the table of hooks and the wrappers that only wait, from NVIDIA's headers and hooks.toml.

    hooks.py --out FOLDER --include FOLDER [--include FOLDER] [--table FILE] -- CC [ARGUMENT ...]

CC is the C compiler: its preprocessor resolves the macros that rename versions. Written to FOLDER:

    hooks.def   HOOK, USED and OPEN for each function of hooks.toml; used by inclusion
    known.def   KNOWN for each function of the driver that the table names, in the order of strcmp
    waits.c     the wrappers of the calls that only wait while the lease is suspended

A call of cuda.h that hooks.toml does not name is an error, exit code 1, that lists all such calls: each needs
a decision.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREATMENTS = ("wraps", "waits", "calls", "passes")
PROTOTYPE = re.compile(r"\bCUresult\s+(cu\w+)\s*\(([^()]*)\)\s*;")
VERSIONED = re.compile(r"PFN_(cu\w+?)_v(\d+)(?:_(ptds|ptsz))?\b")
SYMBOL = re.compile(r"(cu\w+?)(?:_v(\d+))?(?:_(ptds|ptsz))?")
WAITS = "; waits while the lease is suspended"


class TableError(Exception):
    """Raised if the table and the headers do not agree."""


@dataclass(frozen=True)
class Entry:
    """How libvgpu treats one function: one of TREATMENTS."""

    symbol: str
    treatment: str
    family: str
    what: str

    @property
    def library(self) -> str:
        return "NVML" if self.symbol.startswith("nvml") else "CUDA"


def _leaves(treatment: str, body: dict[str, object]) -> Iterable[Entry]:
    for key, value in body.items():
        if isinstance(value, dict):
            for what, symbols in value.items():
                yield from (Entry(symbol, treatment, key, what) for symbol in symbols)
        elif isinstance(value, list):
            yield from (Entry(symbol, treatment, treatment, key) for symbol in value)


def read_table(path: Path) -> dict[str, Entry]:
    """Reads the table, by symbol. Raises TableError for an unknown treatment and a function that is named
    twice.
    """
    table: dict[str, Entry] = {}
    for treatment, body in tomllib.loads(path.read_text()).items():
        if treatment not in TREATMENTS:
            raise TableError(f"{path.name}: [{treatment}] is none of {', '.join(TREATMENTS)}")
        for entry in _leaves(treatment, body):
            if entry.symbol in table:
                raise TableError(f"{path.name}: {entry.symbol} is named twice")
            table[entry.symbol] = entry
    return table


def read_prototypes(compiler: list[str], includes: list[Path]) -> dict[str, str]:
    """Reads the parameters of each function of the driver, by its true symbol name, from cuda_api.h after
    preprocessing.
    """
    flags = [f"-I{folder}" for folder in includes]
    command = [*compiler, "-E", "-P", "-x", "c", *flags, str(HERE / "driver" / "cuda_api.h")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: " ".join(parameters.split()) for name, parameters in PROTOTYPE.findall(text)}


def read_versions(includes: list[Path], symbols: Iterable[str]) -> dict[str, int]:
    """Finds the CUDA version that introduced each symbol. NVIDIA's typedefs name the versions of a function,
    cuda.h its symbols; in order, each version belongs to one symbol. Raises TableError if their numbers
    differ.
    """
    versions: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for header in ("cudaTypedefs.h", "cudaProfilerTypedefs.h"):
        (path,) = (folder / header for folder in includes if (folder / header).exists())
        for name, version, twin in VERSIONED.findall(path.read_text()):
            versions[name, twin].add(int(version))
    variants: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for symbol in symbols:
        if match := SYMBOL.fullmatch(symbol):
            variants[match[1], match[3] or ""].append((int(match[2] or 1), symbol))
    since: dict[str, int] = {}
    for key, named in variants.items():
        if len(named) != len(versions[key]):
            raise TableError(
                f"cudaTypedefs.h has {len(versions[key])} versions of {key[0]}, cuda.h has {len(named)}"
            )
        since |= {
            symbol: version for (_, symbol), version in zip(sorted(named), sorted(versions[key]), strict=True)
        }
    return since


def without_twin(symbol: str) -> str:
    return re.sub(r"_pt(?:ds|sz)$", "", symbol)


def resolve(table: dict[str, Entry], prototypes: dict[str, str]) -> list[Entry]:
    """Returns the table with the twins for the per-thread default stream, which are treated like their base
    function.

    Raises TableError for calls that the table lacks, and for those in [waits] that have no prototype.
    """
    missing = sorted({without_twin(name) for name in prototypes} - table.keys())
    if missing:
        lines = "\n  ".join(missing)
        raise TableError(
            f"cuda.h has {len(missing)} calls that hooks.toml does not name:\n  {lines}\n"
            "hint: decide for each what libvgpu does at it, and name it in hooks.toml"
        )
    wanted = [entry.symbol for entry in table.values() if entry.treatment == "waits"]
    strange = [symbol for symbol in wanted if symbol not in prototypes]
    if strange:
        raise TableError(f"no prototype of: {', '.join(strange)}")
    twins = {
        name: Entry(name, base.treatment, base.family, base.what)
        for name in prototypes
        if name not in table and (base := table[without_twin(name)])
    }
    order = {symbol: at for at, symbol in enumerate(table)}
    order |= {name: order[without_twin(name)] for name in twins}
    return sorted([*table.values(), *twins.values()], key=lambda entry: (order[entry.symbol], entry.symbol))


def hooks_def(entries: list[Entry], since: dict[str, int]) -> str:
    lines = ["/* Made by hooks.py from hooks.toml and NVIDIA's headers. */"]
    for entry in entries:
        symbol, library, family = entry.symbol, entry.library, entry.family
        if entry.treatment == "calls":
            lines.append(f"USED({symbol}, {library})")
        elif entry.treatment == "passes":
            lines.append(f'OPEN({symbol}, {family}, "{entry.what}")')
        elif library == "CUDA" and symbol not in since:
            raise TableError(f"{symbol} is wrapped, and in no header")
        else:
            what = entry.what + (WAITS if entry.treatment == "waits" else "")
            lines.append(f'HOOK({symbol}, {library}, {family}, {since.get(symbol, 0)}, "{what}")')
    return "\n".join(lines) + "\n"


def known_def(entries: list[Entry]) -> str:
    names = sorted(entry.symbol for entry in entries if entry.library == "CUDA")
    return "".join(f"KNOWN({name})\n" for name in names)


def wrapper(symbol: str, parameters: str) -> str:
    names = [] if parameters == "void" else [re.findall(r"\w+", one)[-1] for one in parameters.split(",")]
    return (
        f"VGPU_EXPORT CUresult {symbol}({parameters})\n{{\n    vgpu_suspended_call();\n"
        f"    return CALL_INSIDE({', '.join([symbol, *names])});\n}}\n"
    )


def waits_c(entries: list[Entry], prototypes: dict[str, str]) -> str:
    head = (
        "/* Made by hooks.py from hooks.toml and NVIDIA's headers: calls that need nothing of libvgpu\n"
        " * but to wait in front of the driver while the lease is suspended. */\n"
        '#include "suspended.h"\n#include "functions.h"\n#include "swap.h"\n'
    )
    made = [
        wrapper(entry.symbol, prototypes[entry.symbol]) for entry in entries if entry.treatment == "waits"
    ]
    return "\n".join([head, *made])


def generate(
    out: Path, compiler: list[str], includes: list[Path], table_path: Path = HERE / "hooks.toml"
) -> None:
    """Writes the files, each only if it changes. Raises TableError, CalledProcessError."""
    prototypes = read_prototypes(compiler, includes)
    entries = resolve(read_table(table_path), prototypes)
    made = {
        "hooks.def": hooks_def(entries, read_versions(includes, prototypes)),
        "known.def": known_def(entries),
        "waits.c": waits_c(entries, prototypes),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        path = out / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--include", type=Path, action="append", required=True, help="where cuda.h and nvml.h are"
    )
    parser.add_argument("--table", type=Path, default=HERE / "hooks.toml")
    parser.add_argument("compiler", nargs="+")
    options = parser.parse_args()
    try:
        generate(options.out, options.compiler, options.include, options.table)
    except TableError as error:
        sys.stderr.write(f"hooks.py: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

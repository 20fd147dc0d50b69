"""The rules of the house: who may import whom, how large a module is, what no file may name."""

import ast
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# DESIGN's table: a room may import from these rooms, and from itself. `ctl` reads policy files for
# `policy check`, and asks the planner for `policy test`: both must work without a daemon.
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "api": {"model"},
    "lease": {"model", "lease_layout"},
    "lease_layout": set(),
    "units": {"model"},
    "ledger": {"model"},
    "hardware": {"model"},
    "policy": {"model"},
    "planner": {"policy", "model"},
    "inject": {"model"},
    "modes": {"clock", "hardware", "lease", "units", "model"},
    "node": {
        "clock",
        "modes",
        "inject",
        "planner",
        "policy",
        "hardware",
        "ledger",
        "lease",
        "units",
        "model",
    },
    "serve": {"clock", "node", "api", "inject", "model", "policy"},
    "metrics": {"model"},
    "http": {"metrics", "model", "policy"},
    "ctl": {"api", "model", "policy", "planner"},
    "clock": set(),
    "sd": set(),
    "logs": {"sd", "model"},
    "settings": {"model", "policy"},
}
TOP = {"daemon", "__main__", "__init__"}

# the pure middle: no clock, no files, no processes, no NVML
PURE = ("model", "planner")
IMPURE_MODULES = {
    "os",
    "time",
    "socket",
    "subprocess",
    "sqlite3",
    "asyncio",
    "threading",
    "pynvml",
    "pathlib",
}


def modules() -> list[Path]:
    found = sorted((ROOT / "vgpud").rglob("*.py"))
    return [p for p in found if "gen" not in p.parts and p.name != "lease_layout.py"]


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT / "vgpud").parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names, absolute; relative imports are resolved against the module's package."""
    names: set[str] = set()
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = base + (node.module or "")
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_below(path: Path) -> None:
    room = room_of(path)
    if room in TOP:
        return
    assert room in MAY_IMPORT, f"room {room} is not in the table: say what it may import"
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "vgpud" or len(parts) == 1 or parts[1] == "__version__":
            continue
        assert parts[1] == room or parts[1] in MAY_IMPORT[room], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [p for p in modules() if room_of(p) in PURE], ids=lambda p: p.stem)
def test_the_middle_is_pure(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert not tops & IMPURE_MODULES


def test_module_sizes() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in modules()}
    assert {str(p): n for p, n in sizes.items() if n > 600} == {}
    assert statistics.median(sizes.values()) <= 200
    native = list((ROOT / "native").rglob("*.[ch]"))
    assert {str(p): n for p in native if (n := len(p.read_text().splitlines())) > 600} == {}


def test_function_lengths() -> None:
    lengths = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
    lengths.sort()
    assert lengths[len(lengths) * 95 // 100] <= 50


def test_nothing_of_nvidia_is_committed() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [n for n in names if Path(n).name in {"cuda.h", "nvml.h"} or ".so" in Path(n).suffixes] == []


def test_libvgpu_keeps_its_hands_off() -> None:
    """PEERS: never exit, abort, umask, signal or sigaction inside a tenant's process."""
    forbidden = {"exit", "_exit", "abort", "umask", "signal", "sigaction"}
    for path in (ROOT / "native" / "libvgpu").rglob("*.c"):
        words = set(path.read_text().replace("(", " ( ").split())
        calls = {w for w in words if w in forbidden and f"{w}(" in path.read_text()}
        assert not calls, f"{path.name} calls {calls}"


# what runs in the event loop: its time is `vgpud.clock`, which a test can turn. Elsewhere threads and short
# programs wait for the kernel, and a duration that is only measured is one of `perf_counter`
LOOPS = ("node", "serve", "modes", "http")
ON_THREADS = {"modes/gpu_use.py", "modes/mps/processes.py", "modes/mps/silent.py"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_loops_of_the_daemon_have_one_clock(path: Path) -> None:
    if room_of(path) in LOOPS and str(path.relative_to(ROOT / "vgpud")) not in ON_THREADS:
        assert "time.monotonic" not in imports_and_attributes(path)


def imports_and_attributes(path: Path) -> set[str]:
    """Dotted names of two parts that the module writes, and what it imports."""
    found = imports_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found

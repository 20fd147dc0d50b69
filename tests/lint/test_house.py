"""The rules of the house: imports between rooms, length of functions, names that no file may contain."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from vgpud.model.log_event import LogEvent

ROOT = Path(__file__).resolve().parents[2]

# Each room may import from these rooms, and from itself. `ctl` reads policy files for `policy check` and
# calls the planner for `policy test`, because both work without a daemon.
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "api": {"model"},
    "lease": {"model", "lease_layout", "threads"},
    "lease_layout": set(),
    "units": {"proc", "model"},
    "ledger": {"proc", "model"},
    "hardware": {"pace", "proc", "model"},
    "policy": {"model"},
    "planner": {"policy", "model"},
    "inject": {"model", "threads"},
    "modes": {"audit", "clock", "proc", "hardware", "lease", "units", "model"},
    "node": {
        "audit",
        "clock",
        "directory",
        "modes",
        "pace",
        "inject",
        "planner",
        "policy",
        "hardware",
        "ledger",
        "lease",
        "units",
        "proc",
        "threads",
        "model",
    },
    "serve": {
        "audit",
        "clock",
        "pace",
        "proc",
        "node",
        "api",
        "inject",
        "model",
        "policy",
        "threads",
        "untrusted",
    },
    "remote": {"api", "clock", "logs", "model", "policy", "sd", "settings", "untrusted"},
    "ctl": {"api", "directory", "model", "policy", "planner", "remote"},
    "audit": {"clock", "model"},
    "clock": set(),
    "directory": {"model"},
    "proc": set(),
    "threads": set(),
    "pace": {"clock"},
    "untrusted": set(),
    "sd": set(),
    "logs": {"sd", "model"},
    "settings": {"model", "policy"},
}
TOP = {"daemon", "__main__", "__init__"}

# Rooms within a room: each may import only these of the same room. Files directly in the room may import all
# of them.
INNER_MAY_IMPORT: dict[str, set[str]] = {
    "node/store": set(),
    "node/devices": {"node/store"},
    "node/tenants": {"node/store", "node/devices"},
    "node/view": {"node/store", "node/devices"},
    "serve/metrics": set(),
    "serve/http": {"serve/metrics"},
}

# rooms without clock, files, processes and NVML
PURE = ("model", "planner", "stacks")
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


def committed(*patterns: str) -> list[Path]:
    words = ["git", "ls-files", "--", *patterns]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def modules() -> list[Path]:
    found = sorted((ROOT / "vgpud").rglob("*.py"))
    return [p for p in found if "gen" not in p.parts and p.name != "lease_layout.py"]


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT / "vgpud").parts[0]
    return first.removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Absolute dotted names of the imports. Relative imports are resolved against the module's package."""
    names: set[str] = set()
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = base + (node.module or "")
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def test_a_room_imports_only_from_rooms_below_it() -> None:
    rooms = {room_of(path) for path in modules()} - TOP
    assert rooms <= MAY_IMPORT.keys(), "a room is not in the table: say what it may import"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        if (room := room_of(path)) not in TOP
        for name in imports_of(path)
        if name.startswith("vgpud.") and name.split(".")[1] not in {"__version__", room, *MAY_IMPORT[room]}
    ]
    assert wrong == []


def test_rooms_within_a_room_import_only_from_rooms_below() -> None:
    folders = {f"node/{path.parent.name}" for path in (ROOT / "vgpud" / "node").glob("*/__init__.py")}
    assert folders == {room for room in INNER_MAY_IMPORT if room.startswith("node/")}
    for room, below in INNER_MAY_IMPORT.items():
        outer = room.partition("/")[0]
        for path in sorted((ROOT / "vgpud" / room).glob("*.py")):
            imported = [name.split(".") for name in imports_of(path) if name.startswith(f"vgpud.{outer}.")]
            assert {f"{outer}/{name[2]}" for name in imported} <= below | {room}, path


def test_each_error_has_a_hint() -> None:
    """The hint may be a positional or a named argument. A conditional expression must not be able to give the
    empty text.
    """
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("VgpuError", "Problem", "wrong")
        for hint in [*node.args[{"wrong": 1, "Problem": 3}.get(node.func.id, 2) :][:1], *named(node, "hint")]
        for text in ([hint, hint.body, hint.orelse] if isinstance(hint, ast.IfExp) else [hint])
        if isinstance(text, ast.Constant) and not text.value
    ]
    assert wrong == []


def named(call: ast.Call, name: str) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords if keyword.arg == name]


def test_pure_rooms_import_no_modules_for_input_or_output() -> None:
    pure = [path for path in modules() if room_of(path) in PURE]
    assert len(pure) > 40, "the modules are not found"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in pure
        for name in imports_of(path)
        if name.split(".")[0] in IMPURE_MODULES
    ]
    assert wrong == []


MOST_LINES = 59  # maximum lines of a function


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def c_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Signature and number of lines of each function. With clang-format, only a function's braces are at the
    beginning of a line.
    """
    begin, lines = None, path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line == "{":
            begin = number
        elif line == "}" and begin is not None:
            yield lines[begin - 1], number - begin + 2
            begin = None


def test_each_function_is_below_the_maximum_length() -> None:
    of_c = [(path, *one) for path in committed("*.[ch]") for one in c_functions(path)]
    of_python = [(path, *one) for path in committed("*.py") for one in python_functions(path)]
    assert min(len(of_c), len(of_python)) > 1000, "the functions are not found"
    long = [f"{p.relative_to(ROOT)}: {name}: {n}" for p, name, n in of_c + of_python if n > MOST_LINES]
    assert long == []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_through_other_modules() -> None:
    """Imports inside functions count, because a deferred circular import is circular as well."""
    names = {module_name(path): path for path in modules()}
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {other if other in names else other.rpartition(".")[0] for other in imports_of(path)}
        imported[name] = found & names.keys() - {name}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_header_or_library_of_nvidia_is_committed() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [n for n in names if Path(n).name in {"cuda.h", "nvml.h"} or ".so" in Path(n).suffixes] == []


def test_libvgpu_calls_no_function_that_changes_the_tenants_process() -> None:
    """The functions are exit, abort, umask, signal and sigaction."""
    forbidden = {"exit", "_exit", "abort", "umask", "signal", "sigaction"}
    for path in (ROOT / "native" / "libvgpu").rglob("*.c"):
        words = set(path.read_text().replace("(", " ( ").split())
        calls = {w for w in words if w in forbidden and f"{w}(" in path.read_text()}
        assert not calls, f"{path.name} calls {calls}"


# methods that change the book or the ledger's allocations and events, or publish to watchers
WRITES = {
    "book": {"add", "remove", "replace"},
    "ledger": {"intent", "commit", "forget", "rebind", "mark", "unmark", "event", "set_boot_id"},
    "hub": {"publish"},
}


def writes_of(path: Path) -> list[str]:
    """Calls such as `self._book.replace(...)`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.func.attr in WRITES.get(name.lstrip("_"), ()):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}.{node.func.attr}")
    return found


def test_only_the_store_writes_allocations() -> None:
    store = ROOT / "vgpud" / "node" / "store" / "allocations.py"
    named = {line.rpartition(" ")[2].lstrip("_") for line in writes_of(store)}
    assert named == {f"{owner}.{call}" for owner, calls in WRITES.items() for call in calls}, "not found"
    assert [line for path in modules() if path != store for line in writes_of(path)] == []


# Packages of vgpud whose code runs in the event loop. They read time from `vgpud.clock`, which tests
# simulate. Threads and short programs may wait for the kernel. A duration that is only measured comes from
# `perf_counter`.
LOOPS = ("node", "serve", "modes")
ON_THREADS = {
    "modes/gpu_use.py",
    "modes/mps/processes.py",
    "modes/mps/silent.py",
    "node/tenants/users.py",
}


def test_code_of_the_event_loop_reads_time_from_one_clock() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules()
        if room_of(path) in LOOPS and str(path.relative_to(ROOT / "vgpud")) not in ON_THREADS
        if "time.monotonic" in imports_and_attributes(path)
    ]
    assert wrong == []


def imports_and_attributes(path: Path) -> set[str]:
    """Names of imported modules, and attributes in the form `time.sleep`, that the module uses."""
    found = set(imports_of(path))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def test_log_events_come_from_one_enum() -> None:
    """Operators search and alert by the names of events. `event` may also be a parameter of type LogEvent."""
    levels = {f"log.{level}" for level in ("debug", "info", "warning", "error", "exception", "critical")}
    others = []
    for path in modules():
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in levels:
                event = ast.unparse(call.args[0])
                if not event.startswith("LogEvent") and event != "event":
                    others.append(f"{path}:{call.lineno}: {event}")
    assert others == []


def test_each_log_event_is_used() -> None:
    # vgpud/audit builds the lines of the event AUDIT
    names = {event.name for event in LogEvent} - {"AUDIT"}
    used = {
        node.attr
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "LogEvent"
    }
    assert names <= used, sorted(names - used)

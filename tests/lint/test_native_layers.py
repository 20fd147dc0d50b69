"""The files of libvgpu call downwards only: by the symbols of its objects, no circle and no way up."""

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "native" / "libvgpu" / "CMakeFiles" / "vgpu.dir"
SOURCES = ROOT / "native" / "libvgpu"
LAYERS = ("driver", "ledger", "compute", "residency", "families", "view", "entry")  # the lowest first
# Edges that keep the compute files in a circle; each is to go, and none may come.
KNOWN = {("arbiter_link", "gate"), ("away", "swap"), ("pace", "gate")}


def objects() -> dict[str, Path]:
    """By file: what the compiler made of it. An object whose source has gone or moved is an old build's."""
    made = {path.relative_to(OBJECTS).with_suffix(""): path for path in OBJECTS.rglob("*.c.o")}
    found = {source.stem: path for source, path in made.items() if (SOURCES / source).exists()}
    return found | {"waits": next(path for source, path in made.items() if source.name == "waits.c")}


def edges() -> dict[str, set[str]]:
    """By file: the files that define what it refers to, calls and data alike."""
    owner: dict[str, str] = {}
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in objects().items():
        done = subprocess.run(["nm", path], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            *_, kind, symbol = line.split()
            if kind == "U":
                wanted[name].add(symbol)
            elif kind.isupper():
                owner[symbol] = name
    found = {
        name: {owner[symbol] for symbol in symbols if symbol in owner} for name, symbols in wanted.items()
    }
    return {name: below - {name} for name, below in found.items()}


def layers() -> dict[str, int]:
    """By file: how high its folder is. What is generated is a family."""
    found = {path.stem: LAYERS.index(path.parent.name) for path in SOURCES.glob("*/*.c")}
    return found | {"waits": LAYERS.index("families")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left when files that nothing left calls, or that call nothing left, are taken away."""
    left = {name: set(below) for name, below in graph.items() if below}
    while True:
        called = {name for below in left.values() for name in below}
        ends = {name for name, below in left.items() if not below & left.keys() or name not in called}
        if not ends:
            return [sorted(left)] if left else []
        left = {name: below - ends for name, below in left.items() if name not in ends}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    found = edges()
    assert len(found) > 30, f"build first: ./dev build ({OBJECTS})"
    return found


def test_no_circle_but_by_the_edges_that_are_known(graph: dict[str, set[str]]) -> None:
    cut = {name: {other for other in below if (name, other) not in KNOWN} for name, below in graph.items()}
    assert circles(cut) == []


def test_each_known_edge_is_there_still(graph: dict[str, set[str]]) -> None:
    """One that is gone leaves the list, so that it cannot come back."""
    assert {(name, other) for name, other in KNOWN if other not in graph[name]} == set()


def test_no_file_calls_one_of_a_higher_folder(graph: dict[str, set[str]]) -> None:
    height = layers()
    pairs = {(name, other) for name, below in graph.items() for other in below}
    up = {(name, other) for name, other in pairs if height.get(other, 0) > height.get(name, len(LAYERS))}
    assert up - KNOWN == set()

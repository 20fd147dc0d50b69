"""Native files call downwards only: the symbols of their objects show no circle and no call upwards."""

import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Part:
    """A library or program: the folders of its sources and objects, and its layers from the lowest."""

    sources: str
    objects: str
    layers: tuple[str, ...] = ()
    generated: tuple[tuple[str, str], ...] = ()  # (file name, the folder that it counts as)


PARTS = {
    "libvgpu": Part(
        "libvgpu",
        "libvgpu/CMakeFiles/vgpu.dir",
        ("driver", "ledger", "compute", "residency", "families", "view", "entry"),
        (("waits", "families"),),
    ),
    "arbiter": Part("arbiter", "arbiter/CMakeFiles/vgpu-arbiter.dir"),
    "simulated CUDA": Part("sim/cuda", "sim/CMakeFiles/sim_cuda.dir/cuda"),
    "simulated NVML": Part("sim/nvml", "sim/CMakeFiles/sim_nvml.dir/nvml"),
    "simulated node": Part("sim/state", "sim/CMakeFiles/sim_state.dir/state"),
    "simulated MPS": Part("sim/mps", "sim/CMakeFiles/vgpu-sim-mps.dir/mps"),
}


def objects(part: Part) -> dict[str, Path]:
    """The object file of each source file. Objects without a source are left over from an old build, and are
    skipped.
    """
    folder = ROOT / "build" / "native" / part.objects
    sources = ROOT / "native" / part.sources
    generated = {name for name, _ in part.generated}
    made = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.c.o")}
    ours = {str(source.with_suffix("")): path for source, path in made.items() if (sources / source).exists()}
    return ours | {source.stem: path for source, path in made.items() if source.stem in generated}


def edges(part: Part) -> Graph:
    """For each file, the files that define the functions and data that it refers to."""
    owner: dict[str, str] = {}
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    names = {str(path): name for name, path in objects(part).items()}
    assert names, f"build first: ./dev build ({part.objects})"
    done = subprocess.run(["nm", "-A", *names], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        path, _, said = line.rpartition(":")
        *_, kind, symbol = said.split()
        if kind == "U":
            wanted[names[path]].add(symbol)
        elif kind.isupper():
            owner[symbol] = names[path]
    found = {
        name: {owner[symbol] for symbol in symbols if symbol in owner} for name, symbols in wanted.items()
    }
    return {name: below - {name} for name, below in found.items()}


def heights(part: Part) -> dict[str, int]:
    """File -> the height of its layer."""
    folders = {name: name.split("/")[0] for name in objects(part) if "/" in name} | dict(part.generated)
    return {name: part.layers.index(folder) for name, folder in folders.items() if part.layers}


def circles(graph: Graph) -> list[str]:
    """The files in circles. Files that call no remaining file, or are called by none, are removed until
    nothing changes.
    """
    left = {name: set(below) for name, below in graph.items() if below}
    while True:
        called = {name for below in left.values() for name in below}
        ends = {name for name, below in left.items() if not below & left.keys() or name not in called}
        if not ends:
            return sorted(left)
        left = {name: below - ends for name, below in left.items() if name not in ends}


@pytest.fixture(scope="module", params=PARTS)
def part(request: pytest.FixtureRequest) -> Part:
    return PARTS[request.param]


@pytest.fixture(scope="module")
def graph(part: Part) -> Graph:
    found = edges(part)
    assert len(found) > 4, f"build first: ./dev build ({part.objects})"
    return found


def test_no_native_files_call_each_other_in_a_circle(graph: Graph) -> None:
    assert circles(graph) == []


def test_no_native_file_calls_one_of_a_higher_folder(part: Part, graph: Graph) -> None:
    height = heights(part)
    pairs = {(name, other) for name, below in graph.items() for other in below}
    assert {(name, other) for name, other in pairs if height.get(other, 0) > height.get(name, 99)} == set()

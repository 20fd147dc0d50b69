"""NVIDIA's container toolkit and mig-parted run unchanged on the simulated node."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import needs
from tests.simnode import SimNode

pytestmark = needs("nvidia-tools", "root", "namespaces")
# Runs a program with files of the simulated node in place of those of the machine. The program reads these
# constant paths whatever its options say. /proc is replaced by a folder of links, because nothing can be made
# in /proc, and a kernel without modules has no /proc/modules.
PLACED = """
set -e
root=$1; shift
mkdir -p real proc
mount --rbind /proc real
for name in real/*; do ln -sfn "$PWD/$name" proc; done
ln -sfn "$root/proc/driver" "$root/proc/modules" proc
mount --bind "$root/sys/bus/pci/devices" /sys/bus/pci/devices
mount --bind proc /proc
exec "$@"
"""
LAYOUT = """version: v1
mig-configs:
  mixed:
    - {devices: [0], mig-enabled: true, mig-devices: {1g.18gb: 2, 3g.71gb: 1}}
    - {devices: [1, 2, 3], mig-enabled: false}
"""


@pytest.fixture
def node(sim_node: Callable[..., SimNode]) -> SimNode:
    return sim_node("mixed")


@pytest.fixture
def place(node: SimNode, tmp_path: Path) -> Callable[..., str]:
    def run(*words: str) -> str:
        placed = ["sh", "-c", f"cd {tmp_path}; {PLACED}", "sh", str(node.host_root), *words]
        return node.run(["unshare", "--mount", *placed]).stdout

    return run


def generated(node: SimNode) -> list[str]:
    """The arguments with which nvidia-ctk prints the CDI spec of a node."""
    root = node.sim("root").strip()
    return ["nvidia-ctk", "--quiet", "cdi", "generate", "--format=json", f"--driver-root={root}"]


def nodes_of(spec: dict[str, Any]) -> dict[str, set[str]]:
    """Each device of the CDI spec, and its device nodes."""
    return {
        one["name"]: {node["path"] for node in one["containerEdits"]["deviceNodes"]}
        for one in spec["devices"]
    }


def test_nvidia_ctk_finds_cards_and_driver_below_the_root_of_a_simulated_node(node: SimNode) -> None:
    found = json.loads(node.run(generated(node)).stdout)
    cards, version = node.dump()["devices"], node.dump()["driver_version"]
    devices = nodes_of(found)
    assert devices.keys() == {"all", *(str(c["index"]) for c in cards), *(c["uuid"] for c in cards)}
    assert [devices[card["uuid"]] for card in cards] == [{f"/dev/nvidia{n}"} for n in range(len(cards))]
    mounted = {Path(mount["containerPath"]).name for mount in found["containerEdits"]["mounts"]}
    assert {f"libcuda.so.{version}", f"libnvidia-ml.so.{version}"} < mounted


def test_vgpud_takes_the_driver_files_of_a_simulated_node_from_nvidia_ctk(node: SimNode) -> None:
    node.sim("root")
    words = "from vgpud.inject.driver import find_driver; from pathlib import Path; import sys; "
    asked = f"found = find_driver(Path({str(node.host_root)!r})); "
    told = "print(found.by_toolkit, all(m.host_path.startswith(sys.argv[1]) for m in found.mounts))"
    said = node.run([sys.executable, "-c", words + asked + told, str(node.host_root)]).stdout
    assert said.split() == ["True", "True"]


def test_mig_parted_makes_a_layout_whose_instances_nvidia_ctk_finds(
    node: SimNode, place: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(LAYOUT)
    for verb in ("apply", "assert"):
        place("nvidia-mig-parted", verb, "-f", str(file), "-c", "mixed")
    made = node.dump()["devices"][0]["gpu_instances"]
    assert len(made) == 3 and "3g.71gb: 1" in place("nvidia-mig-parted", "export")
    devices = nodes_of(json.loads(place(*generated(node))))
    instances = {name: nodes for name, nodes in devices.items() if name.startswith("0:")}
    assert len(instances) == 3 and {len(nodes) for nodes in instances.values()} == {3}

"""The comparison of a policy with the devices of one node."""

from pathlib import Path

import pytest

from tests.planner.cards import h200_node
from vgpud.model.device import Node
from vgpud.planner.misfits import misfits
from vgpud.policy.load import check

FITS = [
    "match.index = 7",
    'match.index = "0-7"',
    "match.index = [0, 3]",
    'match.name = "NVIDIA T4*"',  # one policy may serve many nodes
    'mode = "mig"\nmig.layout = ["1g.18gb*7"]',
    'mode = "mig"\nmig.layout = ["3g.71gb@4", "1g.18gb*4"]',
    'mode = "mig"\nmig.layout = ["all-balanced"]',
    'mode = "mig"\nmig.layout = ["off"]',
    'mode = "preload"\nmatch.name = "NVIDIA T4*"',
]
MISFITS = [
    ("match.index = 12", "match.index: the node has no device 12; its indexes are 0 to 7"),
    ('match.index = "6-8"', "match.index: the node has no device 8"),
    (
        'match.uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"',
        "match.uuid: the node has no device GPU-01234567",
    ),
    ('mode = "mig"\nmig.layout = ["1g.10gb*7"]', "mig.layout: device 0: "),
    (
        'mode = "mig"\nmig.layout = ["3g.71gb*3"]',
        "mig.layout: device 0: the card has no layout with 3g.71gb*3",
    ),
]


def problems(tmp_path: Path, rule: str, node: Node) -> list[str]:
    path = tmp_path / "vgpud.toml"
    path.write_text(f"version = 1\n[[device]]\n{rule}\n")
    return [str(problem) for problem in misfits(check(path), node)]


@pytest.mark.parametrize("rule", FITS)
def test_a_policy_that_suits_the_devices_of_the_node_has_no_misfits(tmp_path: Path, rule: str) -> None:
    assert problems(tmp_path, rule, h200_node(8)) == []


@pytest.mark.parametrize(("rule", "said"), MISFITS)
def test_a_policy_rule_that_does_not_suit_the_devices_is_reported_once_with_file_line_and_key(
    tmp_path: Path, rule: str, said: str
) -> None:
    (found,) = problems(tmp_path, rule, h200_node(8))
    line = 2 + len(rule.splitlines())
    assert found.startswith(f"{tmp_path}/vgpud.toml:{line}: device[0].")
    assert said in found


def test_a_node_without_devices_has_no_misfits(tmp_path: Path) -> None:
    assert problems(tmp_path, "match.index = 12", Node()) == []

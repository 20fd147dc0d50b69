"""The prolog's reading of what a job asked for; it needs no Slurm."""

import subprocess

import pytest

from tests.slurm.conftest import SCRIPTS


@pytest.mark.parametrize(
    ("tres", "amount"),
    [
        ("cpu=1,gres/vgpu_memory=4", "4"),
        ("gres:vgpu_memory:4", "4"),
        ("cpu=1,gres/gpu=1", ""),
        ("gres/my_vgpu_memory=140,cpu=1", ""),
        ("gres/vgpu_memory=4x,cpu=1", ""),
        ("gres/vgpu_memory=$(id),cpu=1", ""),
    ],
)
def test_a_resource_is_read_by_its_whole_name_and_as_a_number(tres: str, amount: str) -> None:
    words = ["sh", "-c", '. "$0"/vgpud-slurm.sh; asked "$1" vgpu_memory', str(SCRIPTS), tres]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == amount

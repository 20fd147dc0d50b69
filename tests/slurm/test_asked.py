"""The prolog's reading of what a job asked for; it needs no Slurm."""

import re
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
def test_the_slurm_scripts_read_a_resource_by_its_whole_name_and_as_a_number(tres: str, amount: str) -> None:
    words = ["sh", "-c", '. "$0"/vgpud-slurm.sh; asked "$1" vgpu_memory', str(SCRIPTS), tres]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == amount


def test_the_example_of_gres_conf_offers_every_resource_that_the_scripts_read() -> None:
    names = {"vgpu_memory", "vgpu_cores", "vgpu_cards"}
    assert set(re.findall(r'asked "\$tres" (\w+)', (SCRIPTS / "prolog").read_text())) == names
    assert set(re.findall(r"^Name=(\w+) ", (SCRIPTS / "gres.conf").read_text(), re.MULTILINE)) == names
    example = (SCRIPTS / "slurm.conf.example").read_text()
    for line in ("GresTypes=(.*)", "NodeName=.* Gres=(.*)"):
        (listed,) = re.findall(line, example)
        assert {one.partition(":")[0] for one in listed.split(",")} == names

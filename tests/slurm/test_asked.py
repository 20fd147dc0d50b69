"""The prolog's reading of what a job asked for, and its files; it needs no Slurm."""

import os
import re
import stat
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize(("code", "kind"), [(0, "env"), (34, "refused")])
def test_a_jobs_user_can_read_and_not_write_the_files_of_the_prolog(
    tmp_path: Path, code: int, kind: str
) -> None:
    """An attack: the epilog releases, as root, the allocation that the file names."""
    for name, line in [("squeue", "echo gres/vgpu_memory=4"), ("vgpuctl", f"exit {code}")]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    named = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "65534", "VGPUD_SLURM_DIR": str(tmp_path / "jobs")}
    words = {**os.environ, **named, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([str(SCRIPTS / "prolog")], env=words, check=True)
    [file] = (tmp_path / "jobs").iterdir()
    found = file.stat()
    assert (file.name, found.st_uid, stat.S_IMODE(found.st_mode)) == (f"7.{kind}", os.geteuid(), 0o644)

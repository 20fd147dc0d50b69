"""The whole output of vgpuctl's verbs: tables for people, documents for scripts.

Files in golden/ are edited by hand, together with the change of output.
"""

import json
from pathlib import Path

import pytest
import yaml

from tests.ctl import canned
from tests.ctl.conftest import Ctl
from tests.ctl.daemon import Daemon

GOLDEN = Path(__file__).with_name("golden")

TEXTS = {
    "status": "status",
    "devices": "devices",
    "devices-wide": "devices -o wide",
    "ls": "ls",
    "ls-wide": "ls -o wide",
    "show": "show a1b2c3d4",
    "show-wide": "show a1b2c3d4 -o wide",
    "explain": "explain a1b2c3d4",
    "plan": "plan --memory 4GiB",
    "alloc-env": "alloc -o env",
    "policy-show": "policy show",
    "policy-show-origin": "policy show --origin",
}
DOCUMENTS = {
    "status": "status",
    "devices": "devices",
    "ls": "ls",
    "alloc": "alloc",
    "release": "release a1b2c3d4 e5f6a7b8",
    "resize": "resize a1b2c3d4 --cores 30",
    "show": "show a1b2c3d4",
    "explain": "explain a1b2c3d4",
    "plan": "plan --memory 4GiB",
    "policy-show": "policy show",
    "policy-reload": "policy reload --dry-run",
}
NAMES = {
    "status": ["node1"],
    "devices": [canned.A, canned.B, canned.C],
    "ls": ["a1b2c3d4", "e5f6a7b8"],
    "alloc": ["a1b2c3d4"],
    "release x y": ["x", "y"],
    "resize a1b2c3d4 --memory 1GiB": ["a1b2c3d4"],
    "show a1b2c3d4": ["a1b2c3d4"],
    "explain a1b2c3d4": [canned.A],
    "plan": [canned.A],
    "policy show": ["/etc/vgpud/vgpud.toml", "/etc/vgpud/conf.d/60-site.toml"],
    "policy reload": ["5e0a"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_output_of_each_verb_equals_its_golden_file(name: str, main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListAllocations"] = canned.allocations(canned.aged(canned.preload(), 3), canned.mig())
    done = main(*TEXTS[name].split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_json_and_yaml_output_of_each_verb_equals_its_golden_file(name: str, main: Ctl) -> None:
    done = main(*DOCUMENTS[name].split(), "-o", "json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document == json.loads((GOLDEN / f"{name}.json").read_text())
    assert list(document)[:2] == ["apiVersion", "kind"]
    again = main(*DOCUMENTS[name].split(), "-o", "yaml")
    assert yaml.safe_load(again.stdout) == document


@pytest.mark.parametrize("line", NAMES)
def test_the_output_of_each_verb_in_format_name_equals_its_recording(line: str, main: Ctl) -> None:
    done = main(*line.split(), "-o", "name")
    assert (done.returncode, done.stdout.splitlines()) == (0, NAMES[line])


def test_every_golden_file_belongs_to_a_verb() -> None:
    kept = {path.name for path in GOLDEN.iterdir()}
    assert kept == {f"{name}.txt" for name in TEXTS} | {f"{name}.json" for name in DOCUMENTS}


@pytest.mark.parametrize("name", ["devices", "ls", "explain"])
def test_a_table_without_headers_prints_only_rows(name: str, main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListAllocations"] = canned.allocations(canned.aged(canned.preload(), 3), canned.mig())
    with_them = main(*TEXTS[name].split()).stdout.splitlines()
    without = main(*TEXTS[name].split(), "--no-headers").stdout.splitlines()
    assert [line.split() for line in without] == [line.split() for line in with_them[1:]]


def test_color_marks_failed_states(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = canned.devices("lost")
    painted = main("devices", "--color", "always").stdout
    assert "\x1b[31mlost\x1b[0m" in painted
    assert "\x1b[1mINDEX\x1b[0m" in painted
    assert "\x1b" not in main("devices").stdout


def test_vgpuctl_prints_the_same_in_the_test_process_as_in_its_own(main: Ctl, ctl: Ctl) -> None:
    for line in ("devices", "show a1b2c3d4 -o json"):
        inside, outside = main(*line.split()), ctl(*line.split())
        assert (outside.returncode, outside.stdout, outside.stderr) == (0, inside.stdout, "")

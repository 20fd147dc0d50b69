"""`vgpuctl mig` against a whole daemon."""

import json
from pathlib import Path

import pytest
import yaml

from tests.demo.node import DemoNode
from tests.mig.world import allocate, place, standing

PARTED = """
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-1g.18gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.18gb": 7
  mixed:
    - devices: all
      device-filter: ["0x233510DE"]
      mig-enabled: true
      mig-devices: {}
    - devices: [0]
      device-filter: "0x233510DE"
      mig-enabled: true
      mig-devices:
        "1g.18gb": 2
        "3g.71gb": 1
    - devices: [1]
      mig-enabled: false
    - devices: all
      device-filter: "0x20B010DE"
      mig-enabled: true
      mig-devices: {"1g.5gb": 7}
"""


@pytest.fixture
def parted(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(PARTED)
    return str(path)


def test_vgpuctl_mig_plans_applies_asserts_and_lists_a_layout(node: DemoNode) -> None:
    node.start()
    layout = ["3g.71gb@4", "1g.18gb*2", "--device", "0"]
    planned = node.ctl_json("mig", "plan", *layout)["changes"]
    assert [c["kind"] for c in planned] == ["enable", "create", "create", "create"]
    assert all(c["reason"] for c in planned)
    assert node.ctl("mig", "assert", *layout, check=False).returncode == 1
    done = node.ctl("mig", "apply", *layout)
    assert "device 0: MIG step 4 of 4: create 1g.18gb" in done.stderr
    assert "3g.71gb" in done.stdout
    assert node.ctl("mig", "assert", *layout).returncode == 0
    assert "nothing to change" in node.ctl("mig", "plan", *layout).stderr
    held = allocate(node, "3g.71gb")
    shown = node.ctl("mig", "ls", "--device", "0").stdout
    assert held.id in shown
    stuck = node.ctl("mig", "plan", "7g.141gb", "--device", "0", check=False)
    assert stuck.returncode == 35
    assert f"held by allocation {held.id} of user" in stuck.stderr
    assert node.ctl("mig", "apply", "7g.141gb", "--device", "0", check=False).returncode == 35
    assert node.ctl("mig", "assert", "7g.141gb", "--device", "0", check=False).returncode == 1
    assert place(held) in standing(node)
    assert node.ctl("mig", "defrag", "--dry-run").returncode == 0


REFUSED = {
    "plan": 2,
    "plan 9g.1gb": 33,
    "plan 1g.18gb@": 2,
    "plan 3g.71gb*3": 33,
    "plan all-balanced --device 99": 6,
    "plan none --file x.yaml": 2,
    "import /nowhere.yaml": 2,
    "ls --device 77": 6,
}


def test_vgpuctl_mig_refuses_impossible_requests(node: DemoNode) -> None:
    node.start()
    for line, code in REFUSED.items():
        done = node.ctl("mig", *line.split(), check=False)
        assert (done.returncode, bool(done.stderr)) == (code, True), line


def test_vgpuctl_mig_reads_and_writes_mig_parted_files(node: DemoNode, parted: str, tmp_path: Path) -> None:
    node.start()
    policy = node.ctl("mig", "import", parted, "--config", "mixed").stdout
    assert policy.count("[[device]]") == 8
    (node.folder / "etc" / "vgpud.toml").write_text(policy)
    assert node.ctl("policy", "check", str(node.folder / "etc" / "vgpud.toml")).returncode == 0
    node.stop()
    node.start()
    assert node.ctl("mig", "assert", "--file", parted, "--config", "mixed").returncode == 0
    exported = tmp_path / "exported.yaml"
    exported.write_text(node.ctl("mig", "export").stdout)
    entries = yaml.safe_load(exported.read_text())["mig-configs"]["current"]
    assert {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.18gb": 2, "3g.71gb": 1}} in entries
    assert {"devices": [1], "mig-enabled": False} in entries
    assert {"devices": [2, 3, 4, 5, 6, 7], "mig-enabled": True, "mig-devices": {}} in entries
    assert node.ctl("mig", "assert", "--file", str(exported)).returncode == 0
    assert (
        node.ctl("mig", "assert", "--file", parted, "--config", "all-disabled", check=False).returncode == 1
    )
    node.ctl("mig", "apply", "--file", parted, "--config", "all-1g.18gb", "--device", "1")
    assert len(standing(node, 1)) == 7
    document = json.loads(node.ctl("mig", "export", "-o", "json").stdout)
    assert document["version"] == "v1"

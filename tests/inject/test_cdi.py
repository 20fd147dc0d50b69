"""CDI specs are accepted by container runtimes, and are written completely or not at all."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from vgpud.inject import cdi
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, DeviceNode, Edits, Mount, Owner, Request, State

EDITS = Edits(
    env=(("CUDA_VISIBLE_DEVICES", "GPU-1"), ("NVIDIA_VISIBLE_DEVICES", "void")),
    host_env=(("LD_PRELOAD", "/on/the/host.so"),),
    mounts=(Mount("/run/vgpud/leases/a1", "/run/vgpu/lease", read_only=False), Mount("/lib/x", "/x")),
    device_nodes=(DeviceNode("/dev/nvidia0", 195, 0), DeviceNode("/dev/nvidiactl")),
)


def allocation(name: str = "abc123") -> Allocation:
    return Allocation(name, Request("r", Owner(0, 0)), State.ALLOCATING, (), edits=EDITS)


def test_a_written_cdi_spec_contains_the_edits_of_the_allocation(tmp_path: Path) -> None:
    path = cdi.write_spec(tmp_path / "cdi", allocation())
    spec = json.loads(path.read_text())
    assert spec["kind"] == "vgpud.io/vgpu"
    (device,) = spec["devices"]
    assert f"{spec['kind']}={device['name']}" == allocation().cdi_name
    edits = device["containerEdits"]
    assert edits["env"] == ["CUDA_VISIBLE_DEVICES=GPU-1", "NVIDIA_VISIBLE_DEVICES=void"]
    assert edits["deviceNodes"][0] == {
        "path": "/dev/nvidia0",
        "permissions": "rw",
        "type": "c",
        "major": 195,
        "minor": 0,
    }
    # the absent device node is left out, because a runtime refuses a container if a device node is missing
    assert len(edits["deviceNodes"]) == 1
    assert [m["options"][0] for m in edits["mounts"]] == ["rw", "ro"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("name", "version"), [("abc", "0.3.0"), ("1bc", "0.5.0")])
def test_a_cdi_spec_has_the_lowest_version_that_allows_its_device_name(name: str, version: str) -> None:
    """SPEC.md: device names that begin with a digit need version 0.5.0."""
    assert cdi.build_spec(allocation(name))["cdiVersion"] == version


def test_a_cdi_spec_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("another program's")
    path = cdi.spec_path(tmp_path, "a1")
    path.with_name(f".{path.name}.tmp").symlink_to(tmp_path / "file")
    with pytest.raises(VgpuError) as refused:
        cdi.write_spec(tmp_path, allocation("a1"))
    assert refused.value.code is ErrorCode.CDI_FAILED
    assert (tmp_path / "file").read_text() == "another program's"


HOSTILE = ('"}]}', "\x1b]0;x\x07", "a\nb", "\u202e", "{{x}}", "$(x)")


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_a_tenant_cannot_add_anything_to_a_cdi_spec(tmp_path: Path, text: str) -> None:
    """The tenant's text is in the label of the request and in an environment variable of the edits."""
    held = allocation("a1")
    asked = replace(held.request, label=text)
    edits = Edits(env=(("VGPU_ALLOCATION", "a1"), ("LABEL", text)))
    hostile = replace(held, request=asked, edits=edits)
    read = json.loads(cdi.write_spec(tmp_path, hostile).read_text())
    assert len(read["devices"]) == 1
    assert f"LABEL={text}" in read["devices"][0]["containerEdits"]["env"]


def test_a_cdi_spec_that_is_listed_can_be_removed(tmp_path: Path) -> None:
    for name in ("a1", "b2"):
        cdi.write_spec(tmp_path, allocation(name))
    (tmp_path / "nvidia.yaml").write_text("someone else's")
    assert cdi.list_specs(tmp_path) == {"a1", "b2"}
    cdi.remove_spec(cdi.spec_path(tmp_path, "a1"))
    cdi.remove_spec(cdi.spec_path(tmp_path, "a1"))
    assert cdi.list_specs(tmp_path) == {"b2"}
    assert (tmp_path / "nvidia.yaml").exists()


def test_a_refused_cdi_spec_leaves_no_file(tmp_path: Path) -> None:
    """Container runtimes read each file in the folder whose suffix is .json."""
    bad = replace(allocation(), edits=Edits())
    with pytest.raises(VgpuError) as refused:
        cdi.write_spec(tmp_path, bad)
    assert refused.value.code is ErrorCode.CDI_FAILED
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hooks": []}, "unknown field"),
        ({"kind": "other/kind"}, "kind is"),
        ({"devices": []}, "no devices"),
        ({"devices": [{"name": "-x", "containerEdits": {"env": ["A=1"]}}]}, "bad device name"),
        ({"devices": [{"name": "x1", "containerEdits": {"env": ["A"]}}]}, "bad env"),
        ({"devices": [{"name": "x1", "containerEdits": {"mounts": [{"hostPath": "/a"}]}}]}, "bad mount"),
        ({"devices": [{"name": "x1", "containerEdits": {"deviceNodes": [{}]}}]}, "bad device node"),
    ],
)
def test_the_check_of_a_cdi_spec_refuses_what_container_runtimes_refuse(
    change: dict[str, object], said: str
) -> None:
    with pytest.raises(VgpuError, match=said):
        cdi.validate({**cdi.build_spec(allocation()), **change})


def test_the_error_about_an_unwritable_cdi_folder_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VgpuError, match="cannot be written"):
        cdi.write_spec(tmp_path / "file", allocation())
    cdi.remove_spec(cdi.spec_path(tmp_path / "file", "a1"))


def test_files_of_an_interrupted_write_of_a_cdi_spec_are_removed(tmp_path: Path) -> None:
    path = cdi.write_spec(tmp_path, allocation())
    (tmp_path / f".{path.name}.tmp").write_text("{")
    (tmp_path / ".others.json.tmp").write_text("{")
    assert cdi.list_specs(tmp_path) == {"abc123"}
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, ".others.json.tmp"}


def test_all_users_can_read_a_cdi_spec_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = cdi.write_spec(tmp_path / "cdi", allocation())
    finally:
        os.umask(before)
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o755, 0o644)

"""mig-parted configurations: what vgpuctl reads, and where it reports mistakes."""

from pathlib import Path

import pytest

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.mig_parted import layouts, read, written
from vgpud.model.errors import ErrorCode, VgpuError


def file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def device(index: int, pci: int = 0x233510DE, *profiles: str) -> pb.MigDevice:
    made = pb.MigDevice(device_uuid=f"GPU-{index}", device_index=index, pci_device_id=pci, current=True)
    for number, profile in enumerate(profiles):
        made.instances.add(profile_name=profile, gpu_instance_id=number)
    return made


def test_the_last_mig_parted_entry_that_covers_a_device_counts(tmp_path: Path) -> None:
    text = """
version: v1
mig-configs:
  c:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1, 2], device-filter: ['0x20B010DE', '0x233510DE'], mig-enabled: true}
  - {devices: [2], mig-enabled: false}
  - {devices: all, device-filter: '0x20f110de', mig-enabled: true, mig-devices: {2g.10gb: 1, 1g.5gb+me: 0}}
"""
    name, entries = read(file(tmp_path, text), None)
    found = layouts(entries, [device(0), device(1), device(2), device(3, 0x20F110DE)])
    assert name == "c"
    assert found == {
        "GPU-0": ("1g.5gb*7",),
        "GPU-1": ("none",),
        "GPU-2": ("off",),
        "GPU-3": ("2g.10gb*1",),
    }


def test_a_written_mig_parted_file_is_read_back(tmp_path: Path) -> None:
    import yaml

    devices = [device(0, 1, "1g.5gb", "3g.20gb", "1g.5gb"), device(1, 1), pb.MigDevice(device_index=2)]
    _, entries = read(file(tmp_path, yaml.safe_dump(written(devices, "now"))), "now")
    found = layouts(entries, [device(0), device(1), device(2)])
    assert found == {"GPU-0": ("1g.5gb*2", "3g.20gb*1"), "GPU-1": ("none",), "GPU-2": ("off",)}


ENTRY = "version: v1\nmig-configs: {c: [%s]}"
BAD = {
    "a: [": "not YAML",
    "[]": "version is None",
    "version: v2": "version is 'v2'",
    "version: v1": "no mig-configs",
    "version: v1\nmig-configs: {c: {}}": "c is not a list",
    ENTRY % "1": "not a table",
    ENTRY % "{devices: all}": "mig-enabled is None",
    ENTRY % "{devices: some, mig-enabled: true}": "devices is 'some'",
    ENTRY % "{devices: [-1], mig-enabled: true}": "devices is [-1]",
    ENTRY % "{devices: all, mig-enabled: true, places: 1}": "unknown key 'places'",
    ENTRY % "{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}}": "although mig-enabled is false",
    ENTRY % "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: x}}": "'x' of '1g.5gb'",
    ENTRY % "{devices: all, mig-enabled: true, mig-devices: [1g.5gb]}": "not a table of profiles",
    ENTRY % "{devices: all, mig-enabled: true, device-filter: [zz]}": "not made of PCI ids",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_mig_parted_file_is_refused_with_the_reason(tmp_path: Path, text: str) -> None:
    with pytest.raises(VgpuError) as wrong:
        read(file(tmp_path, text), None)
    assert wrong.value.code is ErrorCode.BAD_REQUEST
    assert BAD[text] in wrong.value.sentence


def test_compute_instances_are_written_by_their_own_names(tmp_path: Path) -> None:
    text = ENTRY % "{devices: all, mig-enabled: true, mig-devices: {1c.3g.20gb: 3}}"
    _, entries = read(file(tmp_path, text), None)
    assert entries[0].layout == ("1c.3g.20gb*3",)


def test_a_configuration_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    entries = "[{devices: all, mig-enabled: false}]"
    text = f"version: v1\nmig-configs: {{a: {entries}, b: {entries}}}"
    for named in (None, "c"):
        with pytest.raises(VgpuError) as wrong:
            read(file(tmp_path, text), named)
        assert "a, b" in wrong.value.hint
    assert read(file(tmp_path, text), "b")[0] == "b"

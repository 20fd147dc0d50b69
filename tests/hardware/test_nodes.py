"""Device nodes, found by the files of the driver below a host root."""

from dataclasses import replace
from pathlib import Path

import pytest
from pyfakefs.fake_filesystem import FakeFilesystem

from vgpud.hardware import nodes
from vgpud.hardware.nodes import device_nodes, device_numbers, monitor_nodes
from vgpud.model.device import Device, Mig, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import DeviceNode, MigSlice

DEVICE = Device(uuid="GPU-1", index=3, minor=1)
SLICE = MigSlice(19, "1g.18gb", Placement(0, 1), gpu_instance_id=9, compute_instance_id=0, uuid="MIG-1")
CAPABILITIES = "/proc/driver/nvidia/capabilities/gpu1/mig"


NODES = {
    "/dev/nvidia1": (195, 1),
    "/dev/nvidiactl": (195, 255),
    "/dev/nvidia-uvm": (238, 0),
    "/dev/nvidia-uvm-tools": (238, 1),
}


@pytest.fixture
def host(fs: FakeFilesystem, monkeypatch: pytest.MonkeyPatch) -> FakeFilesystem:
    """The nodes of data/h200-580.159.04.txt, and one MIG instance."""
    # pyfakefs has no device numbers
    monkeypatch.setattr(nodes, "device_numbers", lambda path: NODES.get(str(path)))
    fs.create_file(
        "/proc/devices", contents="Character devices:\n195 nvidia\n241 nvidia-caps\n238 nvidia-uvm\n"
    )
    fs.create_file(f"{CAPABILITIES}/gi9/access", contents=_access(84))
    fs.create_file(f"{CAPABILITIES}/gi9/ci0/access", contents=_access(85))
    return fs


def _access(minor: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


COMMON = (
    DeviceNode("/dev/nvidia1", 195, 1),
    DeviceNode("/dev/nvidiactl", 195, 255),
    DeviceNode("/dev/nvidia-uvm", 238, 0),
    DeviceNode("/dev/nvidia-uvm-tools", 238, 1),
)
CAPS = (
    DeviceNode("/dev/nvidia-caps/nvidia-cap84", 241, 84),
    DeviceNode("/dev/nvidia-caps/nvidia-cap85", 241, 85),
)


def test_a_whole_device_has_no_capability_nodes(host: FakeFilesystem) -> None:
    assert device_nodes(DEVICE, None) == COMMON


def test_a_mig_instance_has_exactly_two_capability_nodes(host: FakeFilesystem) -> None:
    assert device_nodes(DEVICE, SLICE) == COMMON + CAPS


def test_monitoring_gets_the_device_nodes_of_nvml_and_the_mig_monitor_and_none_of_cuda(
    host: FakeFilesystem,
) -> None:
    assert monitor_nodes(DEVICE) == (COMMON[1], COMMON[0])
    host.create_file("/proc/driver/nvidia/capabilities/mig/monitor", contents=_access(2))
    divided = replace(DEVICE, mig=Mig(capable=True, current=True))
    assert monitor_nodes(divided)[2:] == (DeviceNode("/dev/nvidia-caps/nvidia-cap2", 241, 2),)


def test_device_nodes_below_another_root_are_found_by_their_minor_numbers(host: FakeFilesystem) -> None:
    assert device_nodes(Device(uuid="GPU-1", index=1, minor=None), None, Path("/")) == COMMON[1:]
    assert device_nodes(DEVICE, SLICE, Path("/nowhere"))[0] == DeviceNode("/dev/nvidia1")
    assert len(device_nodes(DEVICE, SLICE, Path("/nowhere"))) == len(COMMON)


def test_capability_nodes_come_from_the_drivers_table_where_the_capability_file_is_absent(
    host: FakeFilesystem,
) -> None:
    host.remove_object(CAPABILITIES)
    host.create_file(
        "/proc/driver/nvidia-caps/mig-minors",
        contents="config 1\nmonitor 2\ngpu1/gi9/access 84\ngpu1/gi9/ci0/access 85\n",
    )
    assert device_nodes(DEVICE, SLICE)[4:] == CAPS


def test_device_numbers_are_those_of_character_devices(tmp_path: Path) -> None:
    assert device_numbers(Path("/dev/null")) == (1, 3)  # numbers from Documentation/admin-guide/devices.txt
    assert device_numbers(tmp_path) is None
    assert device_numbers(tmp_path / "absent") is None


def test_device_nodes_have_no_major_number_if_proc_devices_is_missing(host: FakeFilesystem) -> None:
    host.remove_object("/proc/devices")
    assert [(n.major, n.minor) for n in device_nodes(DEVICE, SLICE)[4:]] == [(None, 84), (None, 85)]


def test_an_instance_that_the_driver_does_not_list_is_an_error(host: FakeFilesystem) -> None:
    host.remove_object(f"{CAPABILITIES}/gi9/ci0/access")
    with pytest.raises(VgpuError, match="gpu1/gi9/ci0/access") as caught:
        device_nodes(DEVICE, SLICE)
    assert caught.value.code is ErrorCode.NVML_FAILED


def test_device_nodes_of_a_mig_slice_without_instance_ids_are_a_bug(host: FakeFilesystem) -> None:
    with pytest.raises(VgpuError) as caught:
        device_nodes(DEVICE, MigSlice(19, "1g.18gb", Placement(0, 1)))
    assert caught.value.code is ErrorCode.BUG

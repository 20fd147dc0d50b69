"""Snapshots: NVML's answers become a Node, even if parts are missing, lost or hanging."""

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tests.hardware.fakenvml import (
    H200_BYTES,
    H200_PROFILES,
    H200_RESERVED,
    FakeNvml,
    process,
    uuid_of,
)
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.mig import profile_name
from vgpud.model.device import ComputeMode, Health, Link, Placement, Virtualisation
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB

LOST = pynvml.NVML_ERROR_GPU_IS_LOST


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(2)


@pytest.fixture
def gateway(nvml: FakeNvml) -> Gateway:
    return Gateway(deadline_seconds=5.0, binding=nvml)


def test_a_snapshot_has_the_values_of_nvml(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.gpus[1].processes = [process(4242, 512 * MIB)]
    nvml.gpus[1].compute_mode = 3
    node = gateway.snapshot()
    assert (node.driver_version, node.nvml_version, node.cuda_version) == (
        "580.159.04",
        "13.580.159.04",
        "13.0",
    )
    assert not node.simulated
    first, second = node.devices
    assert first.uuid == uuid_of(0)
    assert first.name == "NVIDIA H200"
    assert first.pci_bus_id == "00000000:06:00.0"
    assert first.minor == 0
    assert first.memory_total_bytes == H200_BYTES
    assert first.memory_reserved_bytes == H200_RESERVED
    assert first.sm_count == 132
    assert first.compute_capability == (9, 0)
    assert first.mps_capable
    assert first.numa_node == 0
    assert first.virtualisation is Virtualisation.PASSTHROUGH
    assert first.health is Health.OK
    assert second.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    assert second.memory_used_bytes == 512 * MIB
    assert [(p.pid, p.memory_bytes, p.kind, p.gpu_instance_id) for p in second.processes] == [
        (4242, 512 * MIB, "compute", None)
    ]


def test_mig_profiles_are_listed_with_mig_mode_off(gateway: Gateway) -> None:
    mig = gateway.snapshot().devices[0].mig
    assert (mig.capable, mig.current, mig.pending, mig.instances) == (True, False, False, ())
    assert [p.id for p in mig.profiles] == [0, 5, 9, 14, 15, 19, 20]
    half = mig.profile(9)
    assert half is not None
    assert half.name == "3g.71gb"
    assert half.placements == (Placement(0, 4), Placement(4, 4))
    assert (half.sm_count, half.instance_count, half.memory_bytes) == (60, 2, 71424 * MIB)


def test_profiles_of_a_driver_without_names_get_the_same_names(nvml: FakeNvml, gateway: Gateway) -> None:
    named = {p.id: p.name for p in gateway.snapshot().devices[0].mig.profiles}
    nvml.answers["profile_v2"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    unnamed = {p.id: p.name for p in Gateway(binding=nvml).snapshot().devices[0].mig.profiles}
    assert unnamed == named


@pytest.mark.parametrize(
    ("index", "slices", "memory_mib", "total_bytes", "name"),
    [
        # profiles of an A100 of 40 GB, by the tables of the MIG User Guide
        (0, 1, 4864, 42_505_273_344, "1g.5gb"),
        (7, 1, 4864, 42_505_273_344, "1g.5gb+me"),
        (9, 1, 9856, 42_505_273_344, "1g.10gb"),
        (4, 7, 40448, 42_505_273_344, "7g.40gb"),
        (0x0B, 2, 48512, 102_641_958_912, "2g.48gb+gfx"),  # a profile of an RTX PRO 6000
        (0, 1, 4864, 0, "1g"),
    ],
)
def test_an_unnamed_mig_profile_gets_a_name_from_its_slices_and_memory(
    index: int, slices: int, memory_mib: int, total_bytes: int, name: str
) -> None:
    assert profile_name(index, slices, memory_mib * MIB, total_bytes) == name


def test_links_between_devices_are_symmetric_and_nvlink_takes_precedence(gateway: Gateway) -> None:
    nvml = FakeNvml(5)
    links = Gateway(binding=nvml).snapshot().links
    assert links[uuid_of(0), uuid_of(1)] is links[uuid_of(1), uuid_of(0)] is Link.NVLINK
    assert links[uuid_of(0), uuid_of(4)] is Link.SYSTEM
    assert len(links) == 5 * 4


def test_constant_properties_of_devices_are_read_once(nvml: FakeNvml, gateway: Gateway) -> None:
    first = gateway.snapshot()
    nvml.calls.clear()
    nvml.gpus[0].processes = [process(7)]
    second = gateway.snapshot()
    assert second.devices[0].processes and not first.devices[0].processes
    for static in ("nvmlDeviceGetName", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetP2PStatus"):
        assert static not in nvml.calls


@pytest.mark.parametrize("change", ["driver", "mig", "devices"])
def test_constant_properties_of_devices_are_read_again_after_a_possible_change(
    nvml: FakeNvml, gateway: Gateway, change: str
) -> None:
    gateway.snapshot()
    nvml.calls.clear()
    nvml.gpus[0].name = "NVIDIA H200 NVL"
    if change == "driver":
        nvml.driver = "590.1"
    elif change == "mig":
        nvml.gpus[0].mig = [1, 1]
    else:
        nvml.gpus.pop()
    node = gateway.snapshot()
    assert node.devices[0].name == "NVIDIA H200 NVL"
    assert ("nvmlDeviceGetP2PStatus" in nvml.calls) == (len(node.devices) > 1)


def test_memory_is_read_from_a_driver_without_the_v2_struct(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["memory_v2"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    device = gateway.snapshot().devices[0]
    assert device.memory_total_bytes == H200_BYTES
    assert (device.memory_reserved_bytes, device.memory_used_bytes) == (0, H200_RESERVED)


def test_process_lists_fall_back_to_the_older_struct(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    nvml.__dict__["nvmlDeviceGetComputeRunningProcesses_v2"] = lambda gpu: [process(5)]
    assert [p.pid for p in gateway.snapshot().devices[0].processes] == [5]


def test_an_ended_process_is_not_listed(nvml: FakeNvml, gateway: Gateway) -> None:
    """NVML also lists a process that has ended and is not reaped yet, for example an MPS server. On an H200
    such a process kept the next tenant from the device.
    """
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie process until the test reaps it
    nvml.gpus[0].processes = [process(ended.pid), process(os.getpid())]
    assert [p.pid for p in gateway.processes(uuid_of(0))] == [os.getpid()]
    ended.wait()


@pytest.mark.parametrize("number", [0, 2**31, 2**32 - 1])
def test_a_process_row_whose_number_is_no_process_id_is_left_out(
    nvml: FakeNvml, gateway: Gateway, number: int
) -> None:
    """NVML's field is an unsigned 32-bit number, while a pid_t and the field of the API are signed."""
    nvml.gpus[0].processes = [process(number), process(10)]
    assert [p.pid for p in gateway.processes(uuid_of(0))] == [10]
    assert [p.pid for p in gateway.snapshot().devices[0].processes] == [10]


def test_a_process_is_listed_once_and_as_an_mps_client_if_it_is_one(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.gpus[0].processes = [process(10), process(11, None)]
    nvml.gpus[0].mps_processes = [process(10, 3 * MIB)]
    assert [(p.pid, p.kind, p.memory_bytes) for p in gateway.processes(uuid_of(0))] == [
        (10, "mps", 3 * MIB),
        (11, "compute", None),
    ]


QUESTIONS = [
    name
    for name in vars(FakeNvml)
    if name.startswith("nvmlDeviceGet")
    and "Handle" not in name
    # without one of these calls no device can be listed
    and name not in ("nvmlDeviceGetUUID", "nvmlDeviceGetCount")
]


@pytest.mark.parametrize("status", [3, 13, 999, 4, 25])
def test_a_device_that_supports_no_query_is_listed_with_few_properties(nvml: FakeNvml, status: int) -> None:
    for name in QUESTIONS:
        nvml.answers[name] = status
    node = Gateway(binding=nvml).snapshot()
    assert [d.health for d in node.devices] == [Health.OK, Health.OK]
    device = node.devices[0]
    assert (device.uuid, device.name, device.memory_total_bytes) == (uuid_of(0), "", 0)
    assert (device.sm_count, device.minor, device.compute_capability) == (None, None, None)
    assert not device.mig.capable
    assert not device.mps_capable


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_snapshot_survives_any_single_unsupported_call(nvml: FakeNvml, name: str) -> None:
    nvml.answers[name] = pynvml.NVML_ERROR_NOT_SUPPORTED
    node = Gateway(binding=nvml).snapshot()
    assert [(d.uuid, d.health) for d in node.devices] == [(uuid_of(i), Health.OK) for i in range(2)]


def test_the_number_of_multiprocessors_is_that_of_the_largest_profile_if_nvml_has_no_core_count(
    nvml: FakeNvml,
) -> None:
    nvml.answers["nvmlDeviceGetNumGpuCores"] = 3
    assert Gateway(binding=nvml).snapshot().devices[0].sm_count == max(p[5] for p in H200_PROFILES)


def test_a_vgpu_guest_and_an_old_device_have_no_mps(nvml: FakeNvml) -> None:
    nvml.__dict__["nvmlDeviceGetVirtualizationMode"] = lambda gpu: 2
    assert not Gateway(binding=nvml).snapshot().devices[0].mps_capable
    old = FakeNvml(1)
    old.__dict__["nvmlDeviceGetCudaComputeCapability"] = lambda gpu: (3, 0)
    assert not Gateway(binding=old).snapshot().devices[0].mps_capable


def test_a_lost_device_keeps_its_identity_and_the_others_are_read(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.gpus[0].processes = [process(5)]
    before = gateway.snapshot()
    nvml.answers["nvmlDeviceGetHandleByIndex", 0] = LOST
    node = gateway.snapshot()
    assert node.devices[0] == replace(
        before.devices[0],
        processes=(),
        health=Health.LOST,
        health_reason=node.devices[0].health_reason,
    )
    assert "fallen off the bus" in node.devices[0].health_reason
    assert node.devices[1] == before.devices[1]


def test_a_device_lost_during_a_snapshot_is_listed_as_lost(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceGetMemoryInfo", 1] = LOST
    first = gateway.snapshot().devices[1]
    assert (first.uuid, first.health) == (uuid_of(1), Health.LOST)
    del nvml.answers["nvmlDeviceGetMemoryInfo", 1]
    assert gateway.snapshot().devices[1].health is Health.OK


def test_a_device_lost_from_the_start_is_listed(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceGetHandleByIndex", 1] = LOST
    for _ in range(2):
        lost = gateway.snapshot().devices[1]
        assert (lost.uuid, lost.index, lost.health) == ("unknown-gpu-1", 1, Health.LOST)


def test_a_lost_device_does_not_take_the_identity_of_a_device_that_had_its_index_before(
    nvml: FakeNvml, gateway: Gateway
) -> None:
    gateway.snapshot()
    nvml.gpus.reverse()  # the order of devices may change with a driver reload
    nvml.answers["nvmlDeviceGetHandleByIndex", 1] = LOST
    node = gateway.snapshot()
    assert [d.uuid for d in node.devices] == [uuid_of(1), "unknown-gpu-1"]


def test_a_device_that_needs_a_reset_is_shown_as_failed(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceGetMemoryInfo", 0] = pynvml.NVML_ERROR_RESET_REQUIRED
    device = gateway.snapshot().devices[0]
    assert device.health is Health.FAILED
    assert "reset" in device.health_reason


def test_devices_after_a_hanging_one_are_read_at_the_same_time() -> None:
    """The first device hangs for a deadline. Each of the others hangs until all others are read, too."""
    nvml = FakeNvml(8)
    gateway = Gateway(deadline_seconds=60, binding=nvml)
    gateway.snapshot()
    gateway.deadline_seconds = 2
    free, together = threading.Event(), threading.Barrier(len(nvml.gpus) - 1)

    class Hangs(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            gateway.deadline_seconds = 60
            return free.wait(300)

    class Meets(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return together.wait(300) >= 0

    for index in range(len(nvml.gpus)):
        nvml.hangs["nvmlDeviceGetMemoryInfo", index] = Meets() if index else Hangs()
    devices = gateway.snapshot().devices
    free.set()
    assert [device.health for device in devices] == [Health.SILENT] + [Health.OK] * 7


def test_a_hanging_device_is_marked_silent_until_it_answers(nvml: FakeNvml) -> None:
    gateway = Gateway(deadline_seconds=1.0, binding=nvml)
    before = gateway.snapshot()
    free = nvml.hangs["nvmlDeviceGetMemoryInfo", 0] = threading.Event()
    node = gateway.snapshot()
    assert node.devices[0].health is Health.SILENT
    assert "nvmlDeviceGetMemoryInfo" in node.devices[0].health_reason
    assert node.devices[0].name == "NVIDIA H200"
    assert node.devices[1] == before.devices[1]
    nvml.calls.clear()
    assert gateway.snapshot().devices[0].health is Health.SILENT
    # no call was made for device 0, which hangs
    assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 1
    nvml.hangs.clear()
    free.set()
    recovered = threading.Event()
    for _ in range(200):
        if gateway.snapshot().devices[0].health is Health.OK:
            break
        recovered.wait(0.01)
    assert gateway.snapshot().devices[0] == before.devices[0]


def test_snapshots_continue_after_a_driver_reload(nvml: FakeNvml, gateway: Gateway) -> None:
    gateway.snapshot()
    nvml.inits = 0
    nvml.driver = "590.1"
    assert gateway.snapshot().driver_version == "590.1"
    assert nvml.inits == 1


def test_a_closed_nvml_gateway_initialises_nvml_again_at_the_next_call(
    nvml: FakeNvml, gateway: Gateway
) -> None:
    gateway.close()
    assert nvml.calls == []
    gateway.snapshot()
    gateway.close()
    assert nvml.inits == 0
    assert len(gateway.snapshot().devices) == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ErrorCode.NVML_MISSING),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, ErrorCode.DRIVER_MISSING),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, ErrorCode.NVML_FAILED),
    ],
)
def test_a_missing_driver_is_an_error_until_it_is_installed(
    nvml: FakeNvml, status: int, code: ErrorCode
) -> None:
    gateway = Gateway(binding=nvml)
    nvml.answers["nvmlInit"] = status
    with pytest.raises(VgpuError) as caught:
        gateway.snapshot()
    assert caught.value.code is code
    assert caught.value.hint
    del nvml.answers["nvmlInit"]
    assert len(gateway.snapshot().devices) == 2


def test_a_driver_unloaded_during_a_snapshot_is_reported_as_missing(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.answers["nvmlDeviceGetHandleByIndex"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(VgpuError) as caught:
        gateway.snapshot()
    assert caught.value.code is ErrorCode.DRIVER_MISSING


def test_the_nvml_binding_without_a_driver_library_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(VgpuError) as caught:
        Gateway().snapshot()
    assert caught.value.code is ErrorCode.NVML_MISSING


def test_a_simulated_node_is_recognised_by_its_nvml_library(nvml: FakeNvml, gateway: Gateway) -> None:
    nvml.__dict__["nvmlLib"] = SimpleNamespace(vgpuSimStatePath=None)
    assert gateway.snapshot().simulated


def test_the_numa_node_is_taken_from_the_kernel_if_nvml_names_none_or_several(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:06:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    nvml.__dict__["nvmlDeviceGetMemoryAffinity"] = lambda gpu, words, scope: [3] + [0] * (words - 1)
    assert [d.numa_node for d in Gateway(binding=nvml, host_root=tmp_path).snapshot().devices] == [1, None]
    (folder / "numa_node").write_text("-1\n")
    assert Gateway(binding=nvml, host_root=tmp_path).snapshot().devices[0].numa_node is None


def test_the_pcie_root_is_read_from_the_devices_path_in_sysfs(nvml: FakeNvml, tmp_path: Path) -> None:
    links = tmp_path / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:06:00.0").symlink_to("../../../devices/pci0000:05/0000:05:01.0/0000:06:00.0")
    roots = [d.pcie_root for d in Gateway(binding=nvml, host_root=tmp_path).snapshot().devices]
    assert roots == ["pci0000:05", ""]


def test_snapshots_of_many_threads_are_consistent(nvml: FakeNvml, gateway: Gateway) -> None:
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(len(gateway.snapshot().devices))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2] * 8
    assert nvml.inits == 1

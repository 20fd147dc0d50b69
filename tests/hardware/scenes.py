"""Scenes on a simulated node: `python -m tests.hardware.scenes NAME`, which test_simulated.py starts."""

import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from vgpud.hardware.events import DeviceEvent, watch_events
from vgpud.hardware.gateway import Gateway
from vgpud.hardware.nodes import device_nodes
from vgpud.model.device import ComputeMode, Device, Health, Link, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import MigSlice

HOST_ROOT = Path(os.environ["VGPUD_HOST_ROOT"])


def sim(*words: str) -> None:
    assert import_module("vgpu_sim.cli").main(words) == 0


def by_index(gateway: Gateway) -> dict[int, Device]:
    return {device.index: device for device in gateway.snapshot().devices}


def eight_h200() -> None:
    node = Gateway(host_root=HOST_ROOT).snapshot()
    assert node.simulated
    assert (node.driver_version, node.cuda_version) == ("580.159.04", "13.0")
    assert len({d.uuid for d in node.devices}) == 8
    device = node.devices[0]
    assert (device.name, device.memory_total_bytes, device.sm_count) == ("NVIDIA H200", 150754820096, 132)
    assert (device.memory_reserved_bytes, device.compute_capability) == (644939776, (9, 0))
    assert device.mps_capable
    assert [p.name for p in device.mig.profiles] == [
        "7g.141gb",
        "4g.71gb",
        "3g.71gb",
        "2g.35gb",
        "1g.35gb",
        "1g.18gb",
        "1g.18gb+me",
    ]
    assert len(node.links) == 56
    assert set(node.links.values()) == {Link.NVLINK}


def mig_comes_and_goes() -> None:
    gateway = Gateway(host_root=HOST_ROOT)
    uuid = by_index(gateway)[3].uuid
    assert gateway.set_mig_mode(uuid, True) is True
    small = gateway.create_gpu_instance(uuid, 19, Placement(0, 1))
    half = gateway.create_gpu_instance(uuid, 9, Placement(4, 4))
    device = by_index(gateway)[3]
    assert {i.id: i for i in device.mig.instances} == {small.id: small, half.id: half}
    (compute,) = half.compute_instances
    assert compute.uuid.startswith("MIG-")
    mig = MigSlice(9, "3g.71gb", half.placement, half.id, compute.id, compute.uuid)
    caps = [n for n in device_nodes(device, mig, HOST_ROOT) if "nvidia-caps" in n.path]
    assert len({n.minor for n in caps}) == 2
    assert all(n.major is not None and n.path.endswith(f"nvidia-cap{n.minor}") for n in caps)
    try:
        gateway.create_gpu_instance(uuid, 5, Placement(0, 4))
        raise AssertionError("4g fitted over 1g")
    except VgpuError as error:
        assert error.code is ErrorCode.NO_CAPACITY, error
    for instance in (half, small, small):
        gateway.destroy_gpu_instance(uuid, instance.id)
    assert gateway.gpu_instances(uuid) == ()
    assert gateway.set_mig_mode(uuid, False) is True


def mig_mode_of_ampere_waits_for_a_reset() -> None:
    gateway = Gateway(host_root=HOST_ROOT)
    device = by_index(gateway)[0]
    assert device.sm_count == 108, "the largest profile has 98"
    assert gateway.set_mig_mode(device.uuid, True) is False
    mig = by_index(gateway)[0].mig
    assert (mig.current, mig.pending) == (False, True)
    gateway.close()
    sim("reset", "0")
    assert by_index(gateway)[0].mig.current


def one_gpu_is_lost() -> None:
    gateway = Gateway(host_root=HOST_ROOT)
    before = by_index(gateway)
    sim("fault", "gpu-lost", "--device", "5")
    after = by_index(gateway)
    assert after[5].health is Health.LOST, after[5]
    assert (after[5].uuid, after[5].name) == (before[5].uuid, before[5].name)
    assert {i: d for i, d in after.items() if i != 5} == {i: d for i, d in before.items() if i != 5}
    try:
        gateway.set_compute_mode(before[5].uuid, ComputeMode.DEFAULT)
        raise AssertionError("a lost device took a compute mode")
    except VgpuError as error:
        assert error.code is ErrorCode.GPU_LOST, error
    sim("fault", "clear")
    assert by_index(gateway) == before


def one_gpu_hangs() -> None:
    gateway = Gateway(deadline_seconds=1.0, host_root=HOST_ROOT)
    before = by_index(gateway)
    sim("fault", "hang", "--function", "nvmlDeviceGetMemoryInfo*", "--device", "2")
    after = by_index(gateway)
    assert after[2].health is Health.SILENT, after[2]
    assert "nvmlDeviceGetMemoryInfo" in after[2].health_reason
    assert {i: d for i, d in after.items() if i != 2} == {i: d for i, d in before.items() if i != 2}
    sim("fault", "clear")


def old_driver() -> None:
    for name in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGpuInstanceProfileInfoV"):
        sim("fault", "fail", "--function", name, "--code", "13")
    device = by_index(Gateway(host_root=HOST_ROOT))[0]
    assert (device.memory_total_bytes, device.memory_reserved_bytes) == (150754820096, 0)
    assert "1g.18gb+me" in {p.name for p in device.mig.profiles}


def xids_are_told() -> None:
    gateway = Gateway(host_root=HOST_ROOT)
    uuid = by_index(gateway)[6].uuid
    told: list[DeviceEvent] = []
    stop = threading.Event()

    def tell(event: DeviceEvent) -> None:
        told.append(event)
        stop.set()

    watch_events(gateway, tell, stop)
    for _ in range(100):  # repeats the event, because an event before the watch is set up is lost
        sim("fault", "xid", "--device", "6", "--code", "48")
        if stop.wait(0.2):
            break
    assert (told[0].uuid, told[0].xid) == (uuid, 48), told


SCENES: dict[str, Callable[[], None]] = {
    scene.__name__: scene
    for scene in (
        eight_h200,
        mig_comes_and_goes,
        mig_mode_of_ampere_waits_for_a_reset,
        one_gpu_is_lost,
        one_gpu_hangs,
        old_driver,
        xids_are_told,
    )
}

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # a worker thread may hang in the library for ever

"""The devices that a process can open, according to its mounts."""

import os
from pathlib import Path

from vgpud.model.device import Device
from vgpud.node.tenants.sight import visible_devices

DEVICES = (Device("GPU-a", 0, minor=0), Device("GPU-b", 1, minor=1))
HERE = os.getpid()


def test_a_process_in_the_mount_namespace_of_vgpud_sees_every_device() -> None:
    assert visible_devices(HERE, DEVICES) == {"GPU-a", "GPU-b"}


def test_a_dead_process_sees_no_devices() -> None:
    assert visible_devices(1 << 29, DEVICES) == frozenset()


def test_a_container_sees_the_devices_whose_nodes_it_has(tmp_path: Path) -> None:
    """/dev/null and /dev/zero stand for the nodes of the two devices, because they exist everywhere."""
    host, proc = tmp_path / "host", tmp_path / "proc"
    root = proc / "7" / "root" / "dev"
    for folder in (host / "dev", root, proc / "7/ns", proc / "self/ns"):
        folder.mkdir(parents=True)
    (proc / "self/ns/mnt").symlink_to("mnt:[1]")
    (proc / "7/ns/mnt").symlink_to("mnt:[2]")
    (host / "dev/nvidia0").symlink_to("/dev/null")
    (host / "dev/nvidia1").symlink_to("/dev/zero")
    (root / "nvidia0").symlink_to("/dev/null")
    assert visible_devices(7, DEVICES, host, proc) == {"GPU-a"}
    # this node has the name of the device, but another device number
    (root / "nvidia1").symlink_to("/dev/null")
    assert visible_devices(7, DEVICES, host, proc) == {"GPU-a"}
    (root / "nvidia1").unlink()
    (root / "nvidia1").symlink_to("/dev/zero")
    assert visible_devices(7, DEVICES, host, proc) == {"GPU-a", "GPU-b"}

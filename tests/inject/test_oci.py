"""Edits of an OCI config.json: which entries are added, in which order, and that the rest stays as it was."""

import copy
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.inject.test_specs import DRIVER, EDITS_OF_ANY_SHAPE, HOOK
from vgpud.inject.driver import DriverFiles
from vgpud.inject.oci import edited
from vgpud.model.tenancy import DeviceNode, Edits, Mount

EDITS = Edits(
    env=(("CUDA_VISIBLE_DEVICES", "GPU-1"), ("LD_PRELOAD", "/run/vgpu/libvgpu.so")),
    mounts=(
        Mount("/leases/a1/usage", "/run/vgpu/lease/usage", False),
        Mount("/leases/a1", "/run/vgpu/lease"),
    ),
    device_nodes=(DeviceNode("/dev/nvidia0", 195, 0), DeviceNode("/dev/nvidia-uvm")),
)
CONFIG: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "process": {"args": ["sh"], "env": ["PATH=/bin", "CUDA_VISIBLE_DEVICES=7", "LD_PRELOAD=/image/own.so"]},
    "root": {"path": "rootfs"},
    "mounts": [{"destination": "/run", "type": "tmpfs", "source": "tmpfs"}],
    "hooks": {"poststop": [{"path": "/bin/other"}]},
    "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}, "namespaces": []},
}


def test_an_oci_config_gets_environment_mounts_and_devices() -> None:
    after = edited(CONFIG, "a1", EDITS, DriverFiles(), HOOK)
    assert after["process"]["env"] == ["PATH=/bin", "LD_PRELOAD=/image/own.so", "CUDA_VISIBLE_DEVICES=GPU-1"]
    (device,) = after["linux"]["devices"]
    assert (device["path"], device["type"], device["major"], device["minor"]) == ("/dev/nvidia0", "c", 195, 0)
    # the rule that denies all devices stays before the rules that allow vgpud's devices
    assert [rule["allow"] for rule in after["linux"]["resources"]["devices"]] == [False, True]
    assert after["annotations"] == {"vgpud.io/prepared": "a1"}


def test_added_mounts_come_last_and_outer_ones_before_inner_ones() -> None:
    """A tmpfs on /run must not hide the mounts, and the folder of the lease must not hide its usage file."""
    places = [m["destination"] for m in edited(CONFIG, "a1", EDITS, DriverFiles(), HOOK)["mounts"]]
    assert places == ["/run", "/run/vgpu/lease", "/run/vgpu/lease/usage"]


def test_hooks_are_added_after_existing_ones() -> None:
    after = edited(CONFIG, "a1", EDITS, DRIVER, HOOK)["hooks"]
    assert [hook["path"] for hook in after["poststop"]] == ["/bin/other", str(HOOK.path)]
    assert after["createRuntime"][0]["args"][-2:] == ["bind", "a1"]
    assert after["poststop"][1]["args"][-2:] == ["end", "a1"]
    toolkit, ours = after["createContainer"]
    assert toolkit == {"path": "/usr/bin/nvidia-cdi-hook", "args": ["x"]}
    # the hook of vgpud adds the folder of its libraries to the loader's path, and the toolkit's hook adds its
    # own
    assert ours["args"][2:] == ["container", "--preload=/run/vgpu/libvgpu.so", "--libraries=/usr/lib64"]


@given(EDITS_OF_ANY_SHAPE, st.sampled_from([DriverFiles(), DRIVER]))
def test_edits_leave_the_rest_of_an_oci_config_and_the_original_object_unchanged(
    edits: Edits, driver: DriverFiles
) -> None:
    before = copy.deepcopy(CONFIG)
    after = edited(CONFIG, "a1", edits, driver, HOOK)
    assert before == CONFIG
    for key in ("ociVersion", "root"):
        assert after[key] == CONFIG[key]
    assert after["process"]["args"] == ["sh"] and after["linux"]["namespaces"] == []
    names = [entry.partition("=")[0] for entry in after["process"]["env"]]
    assert len(names) == len(set(names))


def test_an_empty_oci_config_gets_all_edits() -> None:
    after = edited({}, "a1", EDITS, DriverFiles(), HOOK)
    assert Path(after["mounts"][0]["source"]) == Path("/leases/a1")
    assert edited(after, "a2", EDITS, DriverFiles(), HOOK)["annotations"] == {"vgpud.io/prepared": "a2"}

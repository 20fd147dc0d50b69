"""CDI specs of every shape are valid by the schema, and leave the files of the container's image
unchanged.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inject.cdi_schema import SCHEMA
from tests.inject.test_cdi import EDITS, allocation
from vgpud.inject import cdi
from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import HookProgram
from vgpud.inject.specs import Specs
from vgpud.model.tenancy import Allocation, DeviceNode, Edits, Mount, Owner, Request, State

VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
HOOK = HookProgram(Path("/usr/lib/vgpud/vgpu-hook"), Path("/run/vgpud"))
PRELOAD = Edits(env=(("A", "1"), ("LD_PRELOAD", "/run/vgpu/libvgpu.so")))
DRIVER = DriverFiles(
    mounts=(Mount("/usr/lib64/libcuda.so.580.1", "/usr/lib64/libcuda.so.1"),),
    hooks=({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["x"]},),
)

TEXT = st.text("abc/=,: ä", max_size=8)
EDITS_OF_ANY_SHAPE = st.builds(
    Edits,
    env=st.lists(st.tuples(st.text("ABC", min_size=1, max_size=4), TEXT), min_size=1, max_size=4).map(tuple),
    mounts=st.lists(st.builds(Mount, TEXT.map("/h".__add__), TEXT.map("/c".__add__), st.booleans())).map(
        tuple
    ),
    device_nodes=st.lists(
        st.builds(
            DeviceNode,
            TEXT.map("/dev/".__add__),
            st.none() | st.integers(0, 511),
            st.none() | st.integers(0, 255),
        )
    ).map(tuple),
)


def held(edits: Edits, name: str = "a1") -> Allocation:
    return Allocation(name, Request("r", Owner(0, 0)), State.ACTIVE, (), edits=edits)


@given(EDITS_OF_ANY_SHAPE, st.sampled_from([None, HOOK]), st.sampled_from([DriverFiles(), DRIVER]))
def test_any_allocation_has_a_valid_cdi_spec(
    edits: Edits, hook: HookProgram | None, driver: DriverFiles
) -> None:
    spec = json.loads(cdi.spec_text(held(edits), driver, hook))
    VALIDATOR.validate(spec)
    cdi.validate(spec)


def hooks_of(edits: Edits, driver: DriverFiles, hook: HookProgram | None) -> list[dict[str, Any]]:
    (device,) = cdi.build_spec(held(edits), driver, hook)["devices"]
    found: list[dict[str, Any]] = device["containerEdits"].get("hooks", [])
    return found


def test_the_cdi_spec_preloads_libvgpu_by_a_hook_that_keeps_the_images_own_preloads() -> None:
    """LD_PRELOAD would replace the image's own preloads. The hook adds libvgpu to them."""
    (device,) = cdi.build_spec(held(PRELOAD), DriverFiles(), HOOK)["devices"]
    assert device["containerEdits"]["env"] == ["A=1"]
    (hook,) = hooks_of(PRELOAD, DriverFiles(), HOOK)
    assert hook["hookName"] == "createContainer" and hook["path"] == str(HOOK.path)
    assert hook["args"] == [
        "vgpu-hook",
        "--run-dir=/run/vgpud",
        "container",
        "--preload=/run/vgpu/libvgpu.so",
    ]


def test_hooks_in_a_cdi_spec_have_an_environment_of_their_own() -> None:
    """runc gives a hook without an environment that of the container. Then the image's LD_PRELOAD would be
    loaded as root on the host.
    """
    for hook in hooks_of(PRELOAD, DriverFiles(), HOOK):
        assert hook["env"] and not any(str(e).startswith("LD_") for e in hook["env"])


def test_without_the_hook_program_the_cdi_spec_uses_ld_preload(tmp_path: Path) -> None:
    missing = HookProgram(tmp_path / "vgpu-hook", tmp_path)
    text = asyncio.run(Specs(tmp_path, missing).write(held(PRELOAD))).read_text()
    assert "LD_PRELOAD=/run/vgpu/libvgpu.so" in text and "hooks" not in text


def test_every_cdi_spec_has_the_drivers_files(tmp_path: Path) -> None:
    specs = Specs(tmp_path, None, DRIVER)
    (device,) = json.loads(asyncio.run(specs.write(held(EDITS))).read_text())["devices"]
    edits = device["containerEdits"]
    assert edits["mounts"][0]["hostPath"] == "/usr/lib64/libcuda.so.580.1"
    assert edits["hooks"][0]["path"] == "/usr/bin/nvidia-cdi-hook"


def test_a_written_cdi_spec_is_recognised_as_current(tmp_path: Path) -> None:
    specs = Specs(tmp_path)
    assert not specs.is_current(allocation())
    path = asyncio.run(specs.write(allocation()))
    assert specs.is_current(allocation())
    specs.driver = DRIVER
    assert not specs.is_current(allocation())
    asyncio.run(specs.write(allocation()))
    assert specs.is_current(allocation())
    path.write_bytes(b"\xff")
    assert not specs.is_current(allocation())


@pytest.mark.parametrize(
    "hook", [{"path": "/x"}, {"hookName": "never", "path": "/x"}, {"hookName": "poststop", "path": "x"}]
)
def test_hooks_that_container_runtimes_refuse_are_refused(hook: dict[str, object]) -> None:
    spec = cdi.build_spec(held(EDITS))
    spec["devices"][0]["containerEdits"]["hooks"] = [hook]
    with pytest.raises(Exception, match="bad hook"):
        cdi.validate(spec)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(spec)

"""HAMi's environment variables: they set limits without a daemon, invalid values are refused, and inside a
lease they are ignored.
"""

import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.native.harness import CONTEXT_BYTES, GIB, MIB, PROBE, Tenant
from tests.simnode import SimNode

MEMORY = "CUDA_DEVICE_MEMORY_LIMIT"
SHARE = "CUDA_DEVICE_SM_LIMIT"
# offsets in struct vgpu_limits and struct vgpu_device_limits (native/common/lease.h)
DEVICES_OFFSET = DEVICE_BYTES = 88


SCOPE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


@pytest.fixture
def scope() -> Iterator[dict[str, str]]:
    """The environment of a scope whose limits only this test's processes share. Its shared memory is removed
    after the test.
    """
    given = {SCOPE: f"/none/{uuid.uuid4()}.cache"}
    yield given
    for folder in folders(given):
        shutil.rmtree(folder)


def folders(scope: dict[str, str]) -> list[Path]:
    """The folders in shared memory that belong to this scope. Other tests make folders there at the same
    time.
    """
    found = []
    for folder in Path("/dev/shm").glob(f"vgpu-{os.geteuid()}-*"):
        with suppress(OSError):
            limits = (folder / "limits").read_bytes()
            (count,) = struct.unpack_from("<I", limits, DEVICES_OFFSET - 4)
            devices = limits[DEVICES_OFFSET : DEVICES_OFFSET + count * DEVICE_BYTES]
            if folder.name.endswith(f"-{fnv_1a(devices + scope[SCOPE].encode()):016x}"):
                found.append(folder)
    return found


def fnv_1a(text: bytes) -> int:
    """The 64-bit hash by which native/libvgpu/driver/standalone.c names the folder."""
    value = 0xCBF29CE484222325
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def info(tenant: Tenant, device: int = 0, /, **env: str) -> dict[str, Any]:
    done = tenant.run(PROBE, "--device", str(device), "info", **env)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    line: dict[str, Any] = json.loads(done.stdout)
    return line


@pytest.mark.parametrize(
    ("value", "limit"),
    [("1073741824", GIB), ("1048576k", GIB), ("1048576K", GIB), ("300m", 300 * MIB), ("2G", 2 * GIB)],
)
def test_a_memory_limit_in_the_environment_is_parsed(scope: dict[str, str], value: str, limit: int) -> None:
    seen = info(Tenant(None), **scope, **{MEMORY: value})
    assert (seen["total_bytes"], seen["free_bytes"]) == (limit, limit - CONTEXT_BYTES)


def test_a_memory_limit_in_the_environment_is_enforced(scope: dict[str, str]) -> None:
    done = Tenant(None).run(PROBE, "fill", "--piece", "32MiB", **scope, **{MEMORY: "1g"})
    assert json.loads(done.stdout)["total_bytes"] == GIB - CONTEXT_BYTES


WRONG = ["", "0", "0m", "abc", "1.5g", "-1", "-1m", "+1g", " 1g", "1g ", "1gb", "1t", "0x10", "1,5g"]
WRONG += ["18446744073709551616", "99999999999999999999g", "1125899906842625", "1048577g"]


@pytest.mark.parametrize("variable", [MEMORY, f"{MEMORY}_0", f"{MEMORY}_7"])
def test_an_invalid_memory_limit_makes_the_first_driver_call_fail(variable: str) -> None:
    for value in WRONG:
        done = Tenant(None).run(PROBE, "info", **{variable: value})
        assert json.loads(done.stdout)["result"] == "CUDA_ERROR_OPERATING_SYSTEM", value
        assert f"{variable}={value} is not a limit" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (SHARE, "101"),
        (SHARE, "-5"),
        (SHARE, "50%"),
        (SHARE, ""),
        (f"{SHARE}_1", "x"),
        (f"{SHARE}_16", "10"),
        (f"{MEMORY}_16", "1g"),
        (f"{MEMORY}_", "1g"),
        (f"{MEMORY}_a", "1g"),
        (f"{MEMORY}_-1", "1g"),
        ("GPU_CORE_UTILIZATION_POLICY", "sometimes"),
    ],
)
def test_an_invalid_limit_beside_a_valid_one_is_refused(variable: str, value: str) -> None:
    done = Tenant(None).run(PROBE, "info", **{MEMORY: "1g", variable: value})
    assert done.returncode == 5
    assert f"{variable}={value} is not a limit" in done.stderr


def test_each_device_can_have_its_own_memory_limit_in_the_environment(scope: dict[str, str]) -> None:
    env = scope | {MEMORY: "1g", f"{MEMORY}_1": "300m", f"{SHARE}_0": "100", SHARE: "0"}
    assert info(Tenant(None), 0, **env)["total_bytes"] == GIB
    assert info(Tenant(None), 1, **env)["total_bytes"] == 300 * MIB


def test_a_device_without_a_limit_shows_all_its_memory(scope: dict[str, str]) -> None:
    env = scope | {f"{MEMORY}_1": "300m"}
    assert info(Tenant(None), 0, **env)["total_bytes"] == 8 * GIB


def test_processes_share_a_limit_of_the_environment_and_a_dead_process_returns_its_memory(
    scope: dict[str, str],
) -> None:
    env = scope | {MEMORY: "1g"}
    process = Tenant(None).start(PROBE, "hold", "256MiB", "--then-wait-on-stdin", **env)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["state"] == "held"
    assert info(Tenant(None), **env)["free_bytes"] == GIB - 256 * MIB - 2 * CONTEXT_BYTES
    process.kill()
    process.communicate()
    filled = Tenant(None).run(PROBE, "fill", "--piece", "32MiB", **env)
    assert json.loads(filled.stdout)["total_bytes"] == GIB - CONTEXT_BYTES


def test_a_shared_memory_folder_writable_by_others_is_refused(scope: dict[str, str]) -> None:
    env = scope | {MEMORY: "1g"}
    info(Tenant(None), **env)
    (folder,) = folders(scope)
    folder.chmod(0o777)
    done = Tenant(None).run(PROBE, "info", **env)
    assert done.returncode == 5 and f"{folder} cannot be used" in done.stderr


def test_limits_in_the_environment_are_ignored_if_there_is_a_lease(lease: Path) -> None:
    for value in ("100m", "abc"):
        seen = info(Tenant(lease), **{MEMORY: value, SHARE: "5"})
        assert seen["total_bytes"] == GIB


def test_known_variables_of_other_tools_do_not_disable_libvgpu(lease: Path) -> None:
    off = {"VGPU_DISABLE": "1", "CUDA_DISABLE_CONTROL": "true"}
    assert info(Tenant(lease), **off)["total_bytes"] == GIB


def test_nvml_and_cuda_report_the_same_limit(sim_node: Any, scope: dict[str, str]) -> None:
    """CUDA_VISIBLE_DEVICES reorders the devices: CUDA's first device is the node's second. Both libraries
    report the limit of this device.
    """
    node: SimNode = sim_node("h200x8")
    uuids = [device["uuid"] for device in node.dump()["devices"]]
    query = (
        "import pynvml as n; n.nvmlInit();"
        "print([n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(i)).total >> 20 for i in (0, 1)])"
    )
    libvgpu = str(Tenant(None).libvgpu[0])
    for visible in ("1,0", f"{uuids[1]},{uuids[0]}", f"{uuids[1][:12]},0"):
        env = scope | {
            "LD_PRELOAD": libvgpu,
            "CUDA_VISIBLE_DEVICES": visible,
            f"{MEMORY}_0": "1g",
            f"{MEMORY}_1": "2g",
        }
        assert node.python(query, env).strip() == "[2048, 1024]"

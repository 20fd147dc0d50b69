"""libvgpu as a CUDA program uses it: every check of api_test.c, with the shipped library and with one built
with ASan and UBSan.
"""

import json
import struct
import subprocess
from pathlib import Path

import pytest

from tests.native.harness import CONTEXT_BYTES, GIB, LIBVGPU, MIB, PROBE, TEST_BUILD, Tenant
from vgpud import lease_layout as layout
from vgpud.lease import UnknownCalls, read_unknown_calls

CHECKS: tuple[str, ...] = (
    "ways-in",
    "proc-address",
    "plain",
    "async",
    "vmm",
    "array",
    "context",
    "card-full",
    "fork",
)
CHECKS += ("signals", "nvml", "small", "pool", "graph", "driver", "processes", "pitch", "private-entries")
CHECKS += ("graph-node", "captures", "cut-captures")


def sanitized() -> tuple[Path, ...]:
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(["cc", f"-print-file-name={n}"], capture_output=True, text=True, check=True)
        for n in names
    ]
    return (*(Path(f.stdout.strip()) for f in found), TEST_BUILD / "sanitized" / "libvgpu.so")


def complaints(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """Returns the lines on standard error, without the one about a device that is not in the lease."""
    return [line for line in done.stderr.splitlines() if not line.startswith("libvgpu: CUDA device 1 ")]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("flavour", ["shipped", "sanitized"])
def test_each_check_of_the_c_program_api_test_passes_with_libvgpu_preloaded(
    lease: Path, check: str, flavour: str
) -> None:
    tenant = Tenant(lease, (LIBVGPU,) if flavour == "shipped" else sanitized())
    done = tenant.run(TEST_BUILD / "api-test", check)
    assert (done.returncode, complaints(done)) == (0, [])


# MiB that libvgpu charges only after the driver has allocated them, for a module and for a pitched
# allocation. The module is unloaded if it is too large. The pitched allocation has rows wider than the
# 512-byte alignment of real devices.
LEARNT_MIB = {"driver": 1000, "pitch": 600}


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "fork"])
def test_the_memory_ledger_never_shows_less_than_the_driver_has_allocated(
    lease: Path, tmp_path: Path, check: str
) -> None:
    """The fake driver compares at every change: libvgpu charges memory before the driver allocates it, and
    removes the charge after the driver has freed it.
    """
    state, usage = tmp_path / "driver-state", lease / "usage"
    state.write_bytes(bytes(48))
    # the size of a context, as an earlier process of the lease would have recorded it
    with usage.open("r+b") as page:
        page.seek(layout.USAGE_CONTEXT_MIB)
        page.write(struct.pack("<I", CONTEXT_BYTES // MIB))
    done = Tenant(lease).run(
        TEST_BUILD / "api-test", check, FAKE_STATE=str(state), FAKE_LEDGER=str(usage), FAKE_LINGER_US="50"
    )
    assert (done.returncode, complaints(done)) == (0, [])
    *_, uncounted = struct.unpack("<6Q", state.read_bytes())
    assert uncounted <= LEARNT_MIB.get(check, 0) * MIB


def test_a_program_that_interposes_driver_functions_itself_is_limited(lease: Path) -> None:
    done = Tenant(lease).run(
        TEST_BUILD / "api-test-asan", "ways-in", ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "way", [["--via", "direct"], ["--via", "dlsym"], ["--via", "proc"]], ids=lambda w: w[1]
)
@pytest.mark.parametrize("program", ["vgpu-probe", "vgpu-probe-dl"])
def test_a_driver_function_is_limited_however_the_program_looks_it_up(
    lease: Path, program: str, way: list[str]
) -> None:
    if program == "vgpu-probe-dl" and way[1] == "direct":
        way = []
    done = Tenant(lease).run(PROBE.with_name(program), *way, "fill", "--piece", "32MiB")
    line = json.loads(done.stdout)
    assert line["total_bytes"] == (1024 - 64) << 20
    assert line["result"] == "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize("family", ["alloc", "pitch", "managed", "async", "vmm", "array"])
def test_every_family_of_allocation_functions_is_limited(lease: Path, family: str) -> None:
    done = Tenant(lease).run(PROBE, "--family", family, "fill", "--piece", "32MiB")
    line = json.loads(done.stdout)
    assert line["total_bytes"] == (1024 - 64) << 20


def test_without_a_lease_driver_calls_pass_through_libvgpu() -> None:
    done = Tenant(None).run(PROBE, "fill", "--piece", "64MiB")
    assert json.loads(done.stdout)["total_bytes"] == 8 * GIB - CONTEXT_BYTES


def test_a_program_without_cuda_is_unaffected_by_libvgpu(lease: Path) -> None:
    done = Tenant(lease).run("bash", "-c", "ls / >/dev/null; grep -c libcuda /proc/self/maps")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_lookup_of_a_driver_function_unknown_to_libvgpu_is_reported(lease: Path) -> None:
    """The fake driver has a function that libvgpu does not know. The call passes, and the usage page of the
    lease names the function.
    """
    done = Tenant(lease).run(TEST_BUILD / "api-test", "ways-in")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_unknown_calls(lease) == UnknownCalls(1, "cuMemTeleport")

"""libvgpu as a CUDA program meets it: every check of api_test.c, as shipped and under ASan/UBSan."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.native.harness import CONTEXT_BYTES, GIB, LIBVGPU, PROBE, TEST_BUILD, Tenant

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
CHECKS += ("signals", "nvml", "small", "pool", "graph", "driver", "processes")


def sanitized() -> tuple[Path, ...]:
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(["cc", f"-print-file-name={n}"], capture_output=True, text=True, check=True)
        for n in names
    ]
    return (*(Path(f.stdout.strip()) for f in found), TEST_BUILD / "sanitized" / "libvgpu.so")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("flavour", ["shipped", "sanitized"])
def test_check(lease: Path, check: str, flavour: str) -> None:
    tenant = Tenant(lease, (LIBVGPU,) if flavour == "shipped" else sanitized())
    done = tenant.run(TEST_BUILD / "api-test", check)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_with_its_own_interposer(lease: Path) -> None:
    done = Tenant(lease).run(
        TEST_BUILD / "api-test-asan", "ways-in", ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "way", [["--via", "direct"], ["--via", "dlsym"], ["--via", "proc"]], ids=lambda w: w[1]
)
@pytest.mark.parametrize("program", ["vgpu-probe", "vgpu-probe-dl"])
def test_every_way_in_is_limited(lease: Path, program: str, way: list[str]) -> None:
    if program == "vgpu-probe-dl" and way[1] == "direct":
        way = []
    done = Tenant(lease).run(PROBE.with_name(program), *way, "fill", "--piece", "32MiB")
    line = json.loads(done.stdout)
    assert line["total_bytes"] == (1024 - 64) << 20
    assert line["result"] == "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize("family", ["alloc", "pitch", "managed", "async", "vmm", "array"])
def test_every_family_is_limited(lease: Path, family: str) -> None:
    done = Tenant(lease).run(PROBE, "--family", family, "fill", "--piece", "32MiB")
    line = json.loads(done.stdout)
    assert line["total_bytes"] == (1024 - 64) << 20


def test_without_a_lease_nothing_changes() -> None:
    done = Tenant(None).run(PROBE, "fill", "--piece", "64MiB")
    assert json.loads(done.stdout)["total_bytes"] == 8 * GIB - CONTEXT_BYTES


def test_a_program_without_cuda_is_left_alone(lease: Path) -> None:
    done = Tenant(lease).run("bash", "-c", "ls / >/dev/null; grep -c libcuda /proc/self/maps")
    assert (done.stdout, done.stderr) == ("0\n", "")

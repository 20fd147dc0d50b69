"""The table of hooks against NVIDIA's headers. A driver call that the table lacks fails the build, and the
error names the call.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.harness import BUILD, ROOT

MAKER = ROOT / "native" / "libvgpu" / "hooks.py"
TABLE = MAKER.with_name("hooks.toml")


def nvidia_headers() -> tuple[Path, Path]:
    cache = (BUILD / "CMakeCache.txt").read_text()
    cuda, nvml = (
        re.search(rf"^VGPU_{name}_INCLUDE:\w+=(.*)$", cache, re.MULTILINE) for name in ("CUDA", "NVML")
    )
    assert cuda is not None and nvml is not None
    return Path(cuda[1]), Path(nvml[1])


def headers_with(folder: Path, declarations: str, typedefs: str) -> Path:
    """NVIDIA's headers with additional declarations, as a later toolkit has them."""
    cuda, _ = nvidia_headers()
    folder.mkdir()
    for name, more in (
        ("cuda.h", declarations),
        ("cudaTypedefs.h", typedefs),
        ("cudaProfilerTypedefs.h", ""),
    ):
        (folder / name).write_text((cuda / name).read_text() + more)
    return folder


def make(out: Path, cuda: Path, table: Path = TABLE) -> "subprocess.CompletedProcess[str]":
    options = {"--out": out, "--table": table}
    given = [str(part) for option in options.items() for part in option]
    given += ["--include", str(cuda), "--include", str(nvidia_headers()[1])]
    command = [sys.executable, str(MAKER), *given, "cc"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["cuMemTeleport", "cuMemAlloc_v9"])
def test_a_driver_call_missing_from_the_table_of_hooks_fails_the_build(tmp_path: Path, name: str) -> None:
    """A new version of a known call counts as missing, because its arguments may differ."""
    cuda = headers_with(
        tmp_path / "cuda", f"CUresult CUDAAPI {name}(CUdeviceptr *where, size_t bytes);\n", ""
    )
    done = make(tmp_path / "out", cuda)
    assert done.returncode == 1
    assert f"cuda.h has 1 calls that hooks.toml does not name:\n  {name}\n" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_waiting_call_gets_wrappers_for_all_its_versions_and_per_thread_variants(
    tmp_path: Path,
) -> None:
    """One line in the table is enough for a call that only waits during a suspension and whose memory is not
    limited.
    """
    declarations = "".join(
        f"CUresult CUDAAPI cuStreamPaint{twin}(CUstream hStream, const unsigned char *colour);\n"
        for twin in ("", "_ptsz")
    )
    typedefs = "typedef CUresult (CUDAAPI *PFN_cuStreamPaint_v14000)(CUstream a, const unsigned char *b);\n"
    cuda = headers_with(tmp_path / "cuda", declarations, typedefs + typedefs.replace("14000", "14000_ptsz"))
    table = tmp_path / "hooks.toml"
    table.write_text(TABLE.read_text().replace("[waits]\n", '[waits]\n"paints" = ["cuStreamPaint"]\n', 1))
    done = make(tmp_path / "out", cuda, table)
    assert (done.returncode, done.stderr) == (0, "")
    hooks = (tmp_path / "out" / "hooks.def").read_text()
    for name in ("cuStreamPaint", "cuStreamPaint_ptsz"):
        assert f'HOOK({name}, CUDA, waits, 14000, "paints; waits while the lease is suspended")\n' in hooks
        assert (
            f"VGPU_EXPORT CUresult {name}(CUstream hStream, const unsigned char *colour)\n"
            f"{{\n    vgpu_suspended_call();\n    return CALL_INSIDE({name}, hStream, colour);\n}}\n"
        ) in (tmp_path / "out" / "waits.c").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"twice" = ["cuMemAlloc"]', "cuMemAlloc is named twice"),
        ('"gone" = ["cuMemVanished"]', "no prototype of: cuMemVanished"),
    ],
)
def test_an_invalid_entry_of_the_table_of_hooks_is_refused(tmp_path: Path, line: str, said: str) -> None:
    table = tmp_path / "hooks.toml"
    table.write_text(TABLE.read_text().replace("[waits]\n", f"[waits]\n{line}\n", 1))
    done = make(tmp_path / "out", nvidia_headers()[0], table)
    assert done.returncode == 1
    assert said in done.stderr

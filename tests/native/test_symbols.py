"""The symbols that libvgpu.so imports and exports, and whether its table of hooks is complete."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.native.harness import BUILD, LIBVGPU
from vgpud import lease_layout

FORBIDDEN = {"exit", "_exit", "abort", "signal", "sigaction", "umask", "__assert_fail", "raise", "kill"}
DATA = Path(__file__).parent / "data" / "driver_symbols.txt"


def symbols(which: str) -> list[str]:
    done = subprocess.run(["nm", "-D", which, LIBVGPU], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def exported() -> set[str]:
    """The symbols that other objects can bind to. The linker also lists hidden names of section ends, which
    are left out.
    """
    done = subprocess.run(
        ["readelf", "--dyn-syms", "-W", LIBVGPU], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[7] for row in rows if len(row) == 8 and row[5] == "DEFAULT" and row[6].isdigit()}


def table() -> dict[str, str]:
    done = subprocess.run([BUILD / "bin/vgpu-hooks-doc"], capture_output=True, text=True, check=True)
    return dict(re.findall(r"^\| `(\w+)` \| \w+ \| (.+) \|$", done.stdout, re.MULTILINE))


def test_libvgpu_imports_no_forbidden_symbol() -> None:
    imported = symbols("--undefined-only")
    assert not {name.split("@")[0] for name in imported} & FORBIDDEN
    assert not [name for name in imported if "GLIBC_PRIVATE" in name]
    assert not [name for name in imported if re.match(r"cu[A-Z]|nvml", name)]


def test_libvgpu_needs_only_the_c_library() -> None:
    done = subprocess.run(["readelf", "-d", LIBVGPU], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", done.stdout))
    assert {name.split(".")[0] for name in needed} <= {"libc", "libdl", "libpthread", "ld-linux-x86-64"}


def test_musl_has_every_symbol_that_libvgpu_needs_at_load_time() -> None:
    """musl itself has the libraries listed here. It has neither glibc's dynamic loader nor its private
    symbols.
    """
    needed = subprocess.run(["readelf", "-d", LIBVGPU], capture_output=True, text=True, check=True).stdout
    assert "[ld-linux" not in needed
    imported = {name.split("@")[0] for name in symbols("--undefined-only")}
    assert not imported & {"__register_atfork", "__tls_get_addr"}


@needs("musl")
@pytest.mark.parametrize("library", ["libvgpu.so", "libvgpu-guard.so"])
def test_a_program_linked_with_musl_runs_with_libvgpu_preloaded(tmp_path: Path, library: str) -> None:
    """The program is not limited: it uses musl, and NVIDIA's driver needs glibc."""
    source = tmp_path / "program.c"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("ran") < 0 ? 1 : 7; }\n')
    subprocess.run(["musl-gcc", "-o", tmp_path / "program", source], check=True)
    environment = {"LD_PRELOAD": str(LIBVGPU.with_name(library))}
    done = subprocess.run(
        [tmp_path / "program"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr


@pytest.mark.parametrize("library", ["libvgpu.so", "libvgpu-guard.so"])
def test_libvgpu_needs_no_symbol_after_glibc_2_17(library: str) -> None:
    """The libraries built with a current compiler must not need newer symbols either. In glibc 2.17 threads
    and dlopen are in separate libraries.
    """
    path = LIBVGPU.with_name(library)
    asked = subprocess.run(["readelf", "-VW", path], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_([\d.]+)", asked)}
    assert versions and max(versions) <= (2, 17), sorted(versions)[-3:]
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "[libpthread.so.0]" in needed and "[libdl.so.2]" in needed


def test_libvgpu_has_no_constructor() -> None:
    """The start-up files of C bring one constructor, frame_dummy. A second one would belong to libvgpu."""
    done = subprocess.run(["readelf", "-SW", LIBVGPU], capture_output=True, text=True, check=True)
    (size,) = re.findall(r"\.init_array\s+INIT_ARRAY\s+\w+\s+\w+\s+(\w+)", done.stdout)
    assert int(size, 16) == 8


def test_libvgpu_exports_the_wrapped_functions_of_the_table() -> None:
    wrapped = {name for name, treatment in table().items() if treatment.startswith("wrapped")}
    assert exported() == wrapped | {"dlsym", "dlvsym", "ioctl"}


def test_every_function_of_the_driver_is_in_the_table_of_hooks() -> None:
    names = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    known = table()
    assert len(names) > 700
    assert [name for name in names if name not in known] == []


def test_the_lease_layout_in_python_equals_that_of_the_c_compiler() -> None:
    done = subprocess.run([BUILD / "bin/vgpu-lease-layout"], capture_output=True, text=True, check=True)
    assert Path(lease_layout.__file__).read_text() == done.stdout

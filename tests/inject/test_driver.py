"""The files of the driver, found in prepared folders and through a stand-in for nvidia-ctk."""

import json
from pathlib import Path

import pytest

from vgpud.inject.driver import DriverFiles, driver_mark, find_driver

VERSION = "580.159.04"


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder as a package installs it. It is the first in the loader's path, and NVIDIA's tools
    are absent.
    """
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        (folder / f"{name}.so.{VERSION}").write_text("")
        (folder / f"{name}.so.1").symlink_to(f"{name}.so.{VERSION}")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    (folder / "libnvidia-ml.so.535.1.1").write_text("an older driver's")
    (folder / "libz.so.1").write_text("somebody else's")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return folder


def by_name(found: DriverFiles) -> dict[str, str]:
    """The name of each file on the host, and its name in the container, both without folders."""
    return {Path(m.container_path).name: Path(m.host_path).name for m in found.mounts}


def test_the_search_without_nvidias_toolkit_finds_libraries_and_links(libraries: Path) -> None:
    found = find_driver()
    assert by_name(found) == {
        "libcuda.so": f"libcuda.so.{VERSION}",
        "libcuda.so.1": f"libcuda.so.{VERSION}",
        f"libcuda.so.{VERSION}": f"libcuda.so.{VERSION}",
        "libnvidia-ml.so.1": f"libnvidia-ml.so.{VERSION}",
        f"libnvidia-ml.so.{VERSION}": f"libnvidia-ml.so.{VERSION}",
        "libnvidia-ptxjitcompiler.so.1": f"libnvidia-ptxjitcompiler.so.{VERSION}",
        f"libnvidia-ptxjitcompiler.so.{VERSION}": f"libnvidia-ptxjitcompiler.so.{VERSION}",
    }
    assert found.own_folder == libraries and not found.by_toolkit
    assert all(mount.read_only for mount in found.mounts)


def test_the_drivers_programs_are_found_in_the_search_path(libraries: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert by_name(find_driver())["nvidia-smi"] == "nvidia-smi"


def test_a_host_without_a_driver_has_no_driver_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ldconfig"
    tool.write_text("#!/bin/sh\necho '\tlibz.so.1 (libc6,x86-64) => /lib/libz.so.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver() == DriverFiles()


def test_driver_libraries_are_found_through_ldconfig(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "ldconfig"
    tool.parent.mkdir()
    lines = "".join(
        f"\tlibcuda.so.1 (libc6,{machine}) => {libraries}/libcuda.so.1\n" for machine in ("x86-64", "AArch64")
    )
    tool.write_text(f"#!/bin/sh\necho '\tlibcuda.so.1 (libc6) => /32bit/libcuda.so.1'\necho '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert find_driver().own_folder == libraries


def toolkit(tmp_path: Path, output: str, code: int = 0) -> None:
    program = tmp_path / "bin" / "nvidia-ctk"
    program.parent.mkdir(exist_ok=True)
    (tmp_path / "spec").write_text(output)
    program.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/words\n'
        f"[ \"$2 $3\" = 'cdi generate' ] && /bin/cat {tmp_path}/spec; exit {code}\n"
    )
    program.chmod(0o755)


def test_driver_files_are_taken_from_nvidia_ctk_where_it_is_installed(
    libraries: Path, tmp_path: Path
) -> None:
    hook = {
        "hookName": "createContainer",
        "path": "/usr/bin/nvidia-cdi-hook",
        "args": ["nvidia-cdi-hook", "update-ldcache"],
    }
    mounts = [
        {"hostPath": f"/usr/lib64/libcuda.so.{VERSION}", "containerPath": f"/usr/lib64/libcuda.so.{VERSION}"},
        {"hostPath": "/tmp/nvidia-mps", "containerPath": "/tmp/nvidia-mps"},
    ]
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "containerEdits": {"mounts": mounts, "hooks": [hook]},
    }
    toolkit(tmp_path, json.dumps(spec))
    found = find_driver()
    assert found.by_toolkit and found.own_folder is None
    assert by_name(found) == {
        f"libcuda.so.{VERSION}": f"libcuda.so.{VERSION}"
    }  # the mounts of MPS pipes that the toolkit lists are dropped, because vgpud mounts its own
    assert list(found.hooks) == [hook]


@pytest.mark.parametrize(("root", "option"), [("/", []), ("/node", ["--driver-root=/node"])])
def test_nvidia_ctk_looks_below_the_hosts_root(
    libraries: Path, tmp_path: Path, root: str, option: list[str]
) -> None:
    """A container of a simulated node must get no files of the driver that the machine may have."""
    toolkit(tmp_path, '{"containerEdits": {}}')
    assert find_driver(Path(root)).by_toolkit
    assert (tmp_path / "words").read_text().split()[3:] == ["--format=json", *option]


@pytest.mark.parametrize(("output", "code"), [("", 0), ("{}", 0), ("[]", 0), ("{", 0), ("{}", 1)])
def test_a_search_finds_the_driver_files_if_nvidias_toolkit_fails(
    libraries: Path, tmp_path: Path, output: str, code: int
) -> None:
    toolkit(tmp_path, output, code)
    found = find_driver()
    assert not found.by_toolkit and "libcuda.so.1" in by_name(found)


def test_the_fingerprint_of_the_drivers_files_changes_with_the_driver(
    libraries: Path, tmp_path: Path
) -> None:
    before = driver_mark(tmp_path)
    assert driver_mark(tmp_path) == before
    (libraries / "libcuda.so.1").unlink()
    (libraries / "libcuda.so.590.10").write_text("new")
    (libraries / "libcuda.so.1").symlink_to("libcuda.so.590.10")
    after = driver_mark(tmp_path)
    assert after != before
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: 590.10")
    assert driver_mark(tmp_path) != after

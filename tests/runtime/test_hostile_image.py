"""Files in an image at the paths that the hook reads. They must neither block the hook nor be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.native.harness import TEST_BUILD

pytestmark = needs("root", "namespaces")

LIBRARY = "/run/vgpu/libvgpu.so"
NULL = os.makedev(1, 3)
CALL = """
import ctypes, os, sys
hook = ctypes.CDLL(sys.argv[1], use_errno=True)
root, folder = sys.argv[2].encode(), b"/opt/driver"
before = len(os.listdir("/proc/self/fd"))
result = hook.vgpu_preload(root, b"%s") if sys.argv[3] == "preload" else hook.vgpu_libraries(root, folder)
print(result, os.strerror(ctypes.get_errno()) if result else open(sys.argv[4]).read(), end="")
assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left open"
linked = os.path.islink(sys.argv[4])
assert not linked or open(sys.argv[4]).read() == "the host's", "the link was followed"
"""


#: the part of vgpu-hook that works in the root file system of a container
HOOK = TEST_BUILD / "librootfs.so"


def call(root: Path, what: str, shown: Path) -> str:
    """Runs the part of vgpu-hook that works in a container's root file system, in a new mount namespace. The
    time limit ends a hook that blocks in open(2).
    """
    words: list[str | Path] = [
        "unshare",
        "--mount",
        sys.executable,
        "-c",
        CALL % LIBRARY,
        HOOK,
        root,
        what,
        shown,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_a_preload_list_of_an_image_that_is_not_a_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    """An attack: /etc/ld.so.preload of an image is a FIFO without a writer. An open(2) of it would block the
    start of the container.
    """
    (tmp_path / "etc").mkdir()
    preload, outside = tmp_path / "etc" / "ld.so.preload", tmp_path / "outside"
    outside.write_text("the host's")
    make = {
        "fifo": lambda: os.mkfifo(preload),
        "device": lambda: os.mknod(preload, 0o600 | 0o020000, NULL),
        "link": lambda: preload.symlink_to(outside),
    }
    make[kind]()
    assert call(tmp_path, "preload", preload) == "-1 Invalid argument"


def test_a_missing_root_folder_of_an_image_is_reported_with_the_errno_of_its_open(tmp_path: Path) -> None:
    assert call(tmp_path / "gone", "preload", tmp_path) == "-1 No such file or directory"


@pytest.mark.parametrize("before", [None, "libimage.so\n"])
def test_the_preload_list_of_an_image_is_kept_behind_libvgpu(tmp_path: Path, before: str | None) -> None:
    (tmp_path / "etc").mkdir()
    preload = tmp_path / "etc" / "ld.so.preload"
    if before is not None:
        preload.write_text(before)
    assert call(tmp_path, "preload", preload) == f"0 {LIBRARY}\n{before or ''}"
    assert preload.read_text() == (before or ""), "the image stays as it is"


def driver_and_libc(root: Path) -> Path:
    """An image with a C library, into which a driver's library should be mounted. Returns the path of that
    mount.
    """
    for folder in ("opt/driver", "usr/lib64"):
        (root / folder).mkdir(parents=True)
    (root / "opt/driver/libcuda.so.1").write_text("the driver's")
    (root / "usr/lib64/libc.so.6").touch()
    return root / "usr/lib64/libcuda.so.1"


def test_a_fifo_in_the_place_of_a_driver_library_is_refused(tmp_path: Path) -> None:
    place = driver_and_libc(tmp_path)
    os.mkfifo(place)
    assert call(tmp_path, "libraries", place) == "-1 Invalid argument"


def test_the_drivers_library_is_mounted_over_that_of_the_image(tmp_path: Path) -> None:
    place = driver_and_libc(tmp_path)
    place.write_text("the image's")
    assert call(tmp_path, "libraries", place) == "0 the driver's"

"""Fixtures: one build of the packages, and one machine with the packages, for all tests of this room."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conditions import unmet
from tests.packaging import debs as packages
from tests.packaging.machine import Machine, NoBoot
from tests.packaging.tools import WORK, debian_root


@pytest.fixture(scope="session")
def debs() -> Path:
    """The folder of the packages, which lack libvgpu for old C libraries."""
    return packages.build()


@dataclass(frozen=True)
class Installed:
    """A machine with the packages. `before` lists the files that it had before their installation."""

    machine: Machine
    debs: Path  # the same folder as /debs in the machine
    before: frozenset[str]
    install_seconds: float


#: Paths that change on any running machine, or are records of dpkg and systemd.
_NOISE: tuple[str, ...] = (
    "/proc",
    "/sys",
    "/dev",
    "/tmp",
    "/debs",
    "/var/log",
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/lib/systemd",
)
_NOISE += (
    "/run/systemd",
    "/run/log",
    "/run/user",
    "/run/udev",
    "/run/host",
    "/home",
    "/etc/.pwd.lock",
    "/etc/dpkg",
)


def listing(machine: Machine) -> frozenset[str]:
    found = machine.shell(r"find / -mindepth 1 \( -path /proc -o -path /sys \) -prune -o -print")
    return frozenset(line for line in found.splitlines() if not line.startswith(_NOISE))


@contextmanager
def installed_on(suite: str, debs: Path) -> Iterator[Installed]:
    """A booted machine of this release with the packages. Skips the test if the machine cannot be made."""
    root = debian_root(suite)
    if isinstance(root, str):
        unmet("machine", root)
    folder = Path(tempfile.mkdtemp(prefix="machine-", dir=WORK))
    shutil.rmtree(folder)
    # cp copies device nodes; Python's copytree would read from them
    subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(folder)], check=True)
    seen = folder.with_name(f"{folder.name}-debs")
    seen.mkdir()
    for name in packages.NAMES:  # vgpud-remote-client is for other machines, and conflicts with vgpud
        for deb in debs.glob(f"{name}_*.deb"):
            (seen / deb.name).hardlink_to(deb)
    try:
        machine = Machine(folder, seen)
    except NoBoot as error:
        shutil.rmtree(seen)
        unmet("machine", error)
    try:
        machine.shell("useradd -m alice; useradd -m bob")
        before = listing(machine)
        # the copy of the root is on disk before the time of the installation is measured
        machine.shell("sync")
        began = time.monotonic()
        machine.shell("dpkg -i /debs/*.deb")
        machine.eventually(
            lambda: machine.unit("vgpud.service", "ActiveState") == "active", "vgpud.service is active"
        )
        seconds = time.monotonic() - began
        # from here on dpkg need not sync, because the machine is temporary
        machine.shell("echo force-unsafe-io >/etc/dpkg/dpkg.cfg.d/unsafe; usermod -a -G vgpu alice")
        yield Installed(machine, seen, before, seconds)
    finally:
        machine.stop()
        shutil.rmtree(seen)


@pytest.fixture(scope="session")
def installed(debs: Path) -> Iterator[Installed]:
    with installed_on("bookworm", debs) as machine:
        yield machine

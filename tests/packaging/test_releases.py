"""The packages on the supported releases of Debian and Ubuntu, as far as each can be tested here.

test_machine.py tests Debian 12 in full, and this file Debian 13 in short. Ubuntu's archive is not available:
apt is asked, with the versions that Ubuntu has, whether the packages install, and a Python of Ubuntu's
version, if installed here, loads all of vgpud.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs, unmet
from tests.packaging.conftest import Installed, installed_on, listing
from tests.packaging.debs import NAMES, one
from tests.packaging.test_machine import MIB, PROBE, SIM, allocations, ctl
from vgpud.model.journal import Message

pytestmark = [needs("debhelper", "apt"), pytest.mark.xdist_group("packaging")]

#: Release -> versions of the packages' dependencies (packages.debian.org, packages.ubuntu.com).
RELEASES = {
    "Debian 12": {"python3": "3.11.2-1+b1", "python3-systemd": "235-1+b2", "libc6": "2.36-9+deb12u10"},
    "Debian 13": {"python3": "3.13.5-1", "python3-systemd": "235-1+b6", "libc6": "2.41-12"},
    "Ubuntu 22.04": {
        "python3": "3.10.6-1~22.04.1",
        "python3-systemd": "234-2ubuntu2",
        "libc6": "2.35-0ubuntu3.8",
    },
    "Ubuntu 24.04": {
        "python3": "3.12.3-0ubuntu2",
        "python3-systemd": "235-1build4",
        "libc6": "2.39-0ubuntu8",
    },
}
#: Versions that every release has at least.
EVERYWHERE = {"systemd": "249", "libgcc-s1": "12", "libstdc++6": "12", "libsystemd0": "249"}
LOAD_ALL = """
import importlib, pkgutil, sys, vgpud
import google._upb._message, grpc, pydantic_core, uvloop, yaml
assert yaml.__with_libyaml__
modules = [m.name for m in pkgutil.walk_packages(vgpud.__path__, "vgpud.") if not m.name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)
print("%d.%d" % sys.version_info[:2], len(modules))
"""


def apt_says(debs: Path, release: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Asks apt whether the packages install on a system with these packages of the release. Changes
    nothing.
    """
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    installed = {**EVERYWHERE, **RELEASES[release]}
    (folder / "status").write_text(
        "\n".join(
            f"Package: {name}\nStatus: install ok installed\nPriority: important\nVersion: {version}\n"
            f"Architecture: {architecture}\nMaintainer: nobody <nobody@example.org>\nDescription: {name}\n"
            for name, version in installed.items()
        )
    )
    options = {
        "Dir::State::status": folder / "status",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": "/dev/null",
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    packages = [str(one(debs, name)) for name in NAMES]
    return subprocess.run(
        ["apt-get", *words, "--simulate", "install", *packages],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("release", [name for name in RELEASES if name != "Ubuntu 22.04"])
def test_apt_installs_the_packages_where_python_is_new_enough(
    debs: Path, release: str, tmp_path: Path
) -> None:
    said = apt_says(debs, release, tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
    assert set(re.findall(r"^Inst (\S+)", said.stdout, re.MULTILINE)) == set(NAMES)


def test_apt_reports_a_too_old_python(debs: Path, tmp_path: Path) -> None:
    said = apt_says(debs, "Ubuntu 22.04", tmp_path)
    assert said.returncode == 100
    assert re.search(r"vgpud : Depends: python3 \(>= 3\.11~\) but 3\.10\.6\S* is", said.stdout), said.stdout


def interpreter(python: str) -> str | None:
    """A Python of this version from PATH or pyenv, or None."""
    found = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}"))
    return str(found[-1]) if found else shutil.which(f"python{python}")


@needs("pythons")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_supported_python_loads_every_module(debs: Path, python: str, tmp_path: Path) -> None:
    program = interpreter(python)
    if program is None:
        unmet("pythons", f"no Python {python} is here")
    subprocess.run(["dpkg-deb", "-x", str(one(debs, "vgpud")), str(tmp_path)], check=True)
    home = tmp_path / "usr" / "lib" / "vgpud"
    (home / "bin" / "python3").unlink()
    (home / "bin" / "python3").symlink_to(program)
    (home / "pyvenv.cfg").write_text(f"home = {Path(program).parent}\n")
    words = [str(home / "bin" / "python3"), "-I", "-B", "-c", LOAD_ALL]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    version, modules = done.stdout.split()
    assert version == python
    assert int(modules) > 200


@pytest.fixture(scope="module")
def trixie(debs: Path) -> Iterator[Installed]:
    with installed_on("trixie", debs) as machine:
        yield machine


@needs("machine", "root")
def test_debian_13_from_the_installation_to_the_purge(trixie: Installed) -> None:
    machine = trixie.machine
    print(f"Debian 13: dpkg -i of the three packages to READY: {trixie.install_seconds:.1f} s")
    assert machine.run("/usr/lib/vgpud/bin/python3", "-I", "-c", LOAD_ALL).stdout.startswith("3.13 ")
    # the installation has compiled the byte code, and vgpud writes to the journal by the distribution's
    # systemd binding
    machine.shell("ls /usr/lib/vgpud/lib/python3/site-packages/vgpud/__pycache__/daemon.cpython-313.pyc")
    said = machine.shell(f"journalctl -b -u vgpud.service -o cat --no-pager MESSAGE_ID={Message.READY}")
    assert {line.partition(":")[0] for line in said.splitlines()} == {"ready"}
    assert "8 devices" in machine.unit("vgpud.service", "StatusText")
    asked = ("vgpuctl", "run", "--isolation", "quota", "--memory", "2GiB", "--")
    filled = machine.run(*SIM, *asked, PROBE, "fill", "--piece", str(32 * MIB), user="alice").stdout
    assert "CUDA_ERROR_OUT_OF_MEMORY" in filled
    held = ctl(machine, "alloc", "--isolation", "quota", "--memory", "1GiB", "-o", "name", user="alice")
    assert ctl(machine, "status", user="bob").returncode == 0
    assert ctl(machine, "alloc", "--memory", "1GiB", user="bob", check=False).returncode == 4
    before = allocations(machine)
    machine.run("systemctl", "restart", "vgpud.service")
    assert allocations(machine) == before != {}
    ctl(machine, "release", held.stdout.strip().split("/")[-1], user="alice")
    machine.shell("dpkg -r vgpud-sim vgpud libvgpu; dpkg -P vgpud-sim vgpud libvgpu")
    assert sorted(listing(machine) - trixie.before) == []
    # the group stays, because its number must not be given to another group while tenants' files have it
    assert machine.shell("getent group vgpu").startswith("vgpu:")

"""Finds, installs or fetches the programs and systems that these tests need, or returns the reason why that
is impossible.
"""

import hashlib
import os
import shutil
import subprocess
import uuid
from pathlib import Path

from tests.sim.outside import archive
from tests.simnode import ROOT

#: Program -> its Debian package.
PROGRAMS = {
    "dpkg-buildpackage": "dpkg-dev",
    "dh": "debhelper",
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "aarch64-linux-gnu-gcc": "crossbuild-essential-arm64",
    "qemu-aarch64-static": "qemu-user-static",
}
#: Dependencies of the packages, so `dpkg -i` installs them without apt, and packages that a machine
#: needs to boot.
INCLUDED = "systemd,systemd-sysv,dbus,python3,python3-systemd,libstdc++6,udev"
FETCH_SECONDS = 400
WORK = ROOT / "build" / "packaging"


def lacking(*programs: str) -> str | None:
    """Tries to install missing programs. Returns why some are still missing, or None."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        for command in (["apt-get", "update", "-qq"], [*install, *(PROGRAMS[name] for name in missing)]):
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=FETCH_SECONDS)
        missing = [program for program in programs if shutil.which(program) is None]
    return f"needs {', '.join(missing)}, which apt-get could not install" if missing else None


def debian_root(suite: str) -> Path | str:
    """The root of a small Debian, kept between runs; or the reason why there is none."""
    root = WORK / f"{suite}-{hashlib.sha256(INCLUDED.encode()).hexdigest()[:8]}"
    if root.is_dir():
        return root
    uri = archive()
    if uri is None:
        return "apt knows no Debian archive here"
    fresh = root.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    words = ["mmdebstrap", "--variant=minbase", f"--include={INCLUDED}", suite, str(fresh), uri]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        return f"mmdebstrap did not end within {FETCH_SECONDS} s"
    if done.returncode != 0:
        return "mmdebstrap: " + (done.stderr.strip().splitlines() or ["failed"])[-1]
    # without a machine id systemd would apply its first-boot presets
    (fresh / "etc" / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
    fresh.rename(root)
    return root

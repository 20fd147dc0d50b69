"""Runs a containerd for the tests: the installed one, or an unpacked one of a later Debian release."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.conditions import unmet
from tests.demo.node import BUILD
from tests.e2e.support import eventually
from tests.sim import outside
from tests.simnode import ROOT

#: Release of containerd, and the Debian suite that has it ("" for the installed one).
SUITES = {"installed": "", "1.7": "trixie", "2": "forky"}
#: The only image of the tests, also of pause containers.
IMAGE = "vgpud.test/image:1"
# the configuration that Debian installs for containerd 1.6, 1.7 and 2.1
DEBIAN = """
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""


def debian_config(release: str) -> str:
    """The configuration file that Debian installs with a release of containerd."""
    if not SUITES[release]:
        return DEBIAN
    return (package(release) / "etc/containerd/config.toml").read_text()


def package(release: str) -> Path:
    """The unpacked package of a release. Skips the test if it cannot be fetched."""
    folder = outside.unpacked("containerd", SUITES[release])
    return folder or unmet("debian-archive", outside.why[f"containerd-{SUITES[release]}"])


def documented_tables() -> str:
    """The tables of docs/containers.md that are appended to containerd's file."""
    page = (ROOT / "docs" / "containers.md").read_text()
    blocks: list[str] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tables,) = (block for block in blocks if "runtimes.vgpu" in block)
    return tables


def documented_config(release: str, cdi: Path) -> str:
    """Debian's file with the lines of docs/containers.md and docs/kubernetes.md, the test's paths, and
    settings for a machine without CAP_SYS_RESOURCE and without a registry. Containers share the host's
    network.
    """
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "`enable_cdi = true`" in page
    head = '[plugins."io.containerd.grpc.v1.cri"]\n'
    here = f"""
    enable_cdi = true
    cdi_spec_dirs = ["{cdi}"]
    restrict_oom_score_adj = true
    sandbox_image = "{IMAGE}"
"""
    added = '\n[plugins."io.containerd.grpc.v1.cri".containerd]\n  snapshotter = "native"\n'
    tables = documented_tables().replace("/usr/bin/vgpu-runtime", str(BUILD / "bin" / "vgpu-runtime"))
    config = debian_config(release)
    assert head in config
    return config.replace(head, head + here) + tables + added


@dataclass
class Containerd:
    folder: Path
    environment: Mapping[str, str]
    programs: Path | None = None  # folder with the programs; None: those on PATH
    _daemon: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    def program(self, name: str) -> str:
        return name if self.programs is None else str(self.programs / name)

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program("ctr"), "--address", str(self.socket), *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def start(self) -> None:
        """Starts containerd and waits until it serves. Skips the test if it ends."""
        folder, path = self.folder, f"{self.programs or ''}:{self.environment['PATH']}"
        places = ("--root", folder / "root", "--state", folder / "state", "--address", self.socket)
        with (folder / "log").open("ab") as log:
            self._daemon = daemon = subprocess.Popen(
                [self.program("containerd"), "-c", folder / "config.toml", *places],
                env={**self.environment, "PATH": path},
                stdout=log,
                stderr=log,
            )
        eventually(
            lambda: daemon.poll() is not None or self.ctr("version").returncode == 0, "containerd serves"
        )
        if daemon.poll() is not None:
            unmet("containerd", f"it does not start here: {self.log()[-500:]}")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    def end_containers(self) -> None:
        """Leaves what a reboot leaves of containers of a killed containerd: no processes, mounts and
        state.
        """
        shims = [
            pid
            for pid, command in _commands()
            if "containerd-shim" in command and str(self.socket) in command
        ]
        inits = [pid for shim in shims for pid in _children(shim)]
        for pid in (*shims, *inits):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in inits), "the containers end")
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for path in reversed([path for path in mounted if path.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", path], check=True)
        for bundle in (self.folder / "state" / "io.containerd.runtime.v2.task").glob("*/*"):
            self._remove_outside(bundle)
        shutil.rmtree(self.folder / "state")

    def _remove_outside(self, bundle: Path) -> None:
        """Removes what an ended container has left outside of containerd's folders: its control group, runc's
        state, and the socket of its shim.
        """
        states = Path("/run/containerd/runc") / bundle.parent.name
        words = ["runc", "--root", str(states), "delete", "--force", bundle.name]
        subprocess.run(words, env=self.environment, check=False, capture_output=True)
        for record in ("address", "bootstrap.json"):  # of containerd 1.7 and 2
            with suppress(OSError):
                for socket in re.findall(r"unix://(/run/containerd/s/\w+)", (bundle / record).read_text()):
                    Path(socket).unlink(missing_ok=True)

    def stop(self) -> None:
        assert self._daemon is not None
        self._daemon.terminate()
        self._daemon.wait(300)


def _commands() -> Iterator[tuple[int, str]]:
    """The command lines of all processes, by pid."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(path.parent.name), path.read_text().replace("\0", " ")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


@contextmanager
def containerd(
    folder: Path, config: str, environment: Mapping[str, str] = os.environ, release: str = "installed"
) -> Iterator[Containerd]:
    """Runs a containerd during the block.

    Its files and sockets are in `folder`, so that others can run beside it. By default the socket of NRI,
    which containerd 2 serves, is /var/run/nri/nri.sock.
    """
    nri = f'\n[plugins."io.containerd.nri.v1.nri"]\n  socket_path = "{folder}/nri.sock"\n'
    (folder / "config.toml").write_text(config.replace("/var/lib/containerd/opt", f"{folder}/opt") + nri)
    programs = package(release) / "usr/bin" if SUITES[release] else None
    made = Containerd(folder, environment, programs)
    made.start()
    try:
        yield made
    finally:
        made.stop()

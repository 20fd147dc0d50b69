"""The conditions that a test may have for a machine. Only they may skip a test.

A test names its conditions with `@needs("podman", "root")`. A condition with `real=True` is a program (or a
file) that `./dev` does not install: its tests have the mark `real`, and only `./dev test-all` runs them. A
test that finds a condition missing while it runs calls `unmet("namespaces", what_the_kernel_said)`. Every
other skip fails.

`python -m tests.conditions` prints the table of docs/testing.md, `python -m tests.conditions packages` the
Debian packages that the real tests need and this machine lacks.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

#: PATH with the folders of Debian's system programs, which not every user's PATH contains
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Condition:
    why: str  # what tests use the condition for
    how: str  # how to meet the condition; empty: install the Debian packages
    packages: tuple[str, ...] = ()
    real: bool = False
    programs: tuple[str, ...] = ()  # programs that must all be installed
    look: Callable[[], str] = str  # returns what else is missing, or ""

    def missing(self) -> str:
        """Returns what this machine lacks for the condition, or ""."""
        lacking = [program for program in self.programs if shutil.which(program, path=PATH) is None]
        return f"{', '.join(lacking)} not installed" if lacking else self.look()


def installed(packages: str, why: str, programs: str = "", look: Callable[[], str] = str) -> Condition:
    """A real condition: programs of Debian packages. By default the programs have the packages' names."""
    return Condition(why, "", tuple(packages.split()), True, tuple((programs or packages).split()), look)


def fetched(why: str, how: str) -> Condition:
    """A real condition: files that the tests fetch once into build/outside and never commit."""
    return Condition(why, how, real=True)


def _not_root() -> str:
    return "" if os.geteuid() == 0 else f"this is user {os.geteuid()}"


@cache
def _namespaces() -> str:
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "mount", "-t", "tmpfs"]
    try:
        done = subprocess.run([*words, "tmpfs", "/tmp"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare is not installed"
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


@cache
def _user_namespaces() -> str:
    done = subprocess.run(["unshare", "--user", "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


@cache
def _networks() -> str:
    words = ["unshare", "--net", "ip", *["link", "add", "node", "type", "veth", "peer", "name", "client"]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


def _fuse() -> str:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


def _cgroups() -> str:
    for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.access(f"{top}/cgroup.procs", os.W_OK):
            return ""
    return "no tree of cgroup v2 that this user may write to"


def _traced() -> str:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0":
        return ""
    return f"kernel.yama.ptrace_scope is {scope.read_text().strip()}"


def _open_python() -> str:
    closed = [folder for folder in Path(sys.executable).resolve().parents if not folder.stat().st_mode & 1]
    return f"Python lies in {closed[-1]}, which other users cannot enter" if closed else ""


def _before_branch(branch: int) -> str:
    """Returns why simulated nodes have a driver before this branch, or "" if they have not. Their driver is
    that of VGPU_SIM_DRIVER, or else that of their profile (580).
    """
    named = os.environ.get("VGPU_SIM_DRIVER", "")
    return f"the simulated driver is {named}" if named and int(named) < branch else ""


def _kubernetes() -> str:
    folder = os.environ.get("VGPU_KUBERNETES", "")
    if not folder:
        return "no folder of Kubernetes' programs is given"
    lacking = [name for name in KUBERNETES if not os.access(Path(folder) / name, os.X_OK)]
    return f"{folder} has no {', '.join(lacking)}" if lacking else ""


KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")


def _browser() -> str:
    return "" if browser() else f"none of {', '.join(BROWSERS)} is installed"


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser() -> str | None:
    """The first browser of BROWSERS that is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name, path=PATH))), None)


CONDITIONS: dict[str, Condition] = {
    # permissions of the kernel or the user: the only conditions for which the first tier may skip tests
    "root": Condition("becoming other users, giving files away, mounts", "run it as root", look=_not_root),
    "namespaces": Condition(
        "mounts, pids and clocks of a test's own",
        "run it as root, in a container with CAP_SYS_ADMIN and no seccomp filter on unshare and mount",
        look=_namespaces,
    ),
    "networks": Condition(
        "two networks with one link between them",
        "run it as root, with iproute2, where the kernel has veth",
        programs=("ip", "unshare"),
        look=_networks,
    ),
    "user-namespaces": Condition(
        "a tenant with uids of its own",
        "run it where `/` is a mount point (not in a plain chroot) and user namespaces are allowed",
        look=_user_namespaces,
    ),
    "fuse": Condition(
        "files of a FUSE file system that delays the kernel",
        "run it as root where the kernel has FUSE",
        look=_fuse,
    ),
    "cgroups": Condition(
        "memory limits that the driver enforces for a control group",
        "run it as root where cgroup v2 is mounted below /sys/fs/cgroup and can be written to",
        look=_cgroups,
    ),
    "ptrace": Condition(
        "ending a process at an instruction, reading another process's memory",
        "run it as root, or set kernel.yama.ptrace_scope to 0",
        look=_traced,
    ),
    "open-python": Condition(
        "programs in Python of other users",
        "a Python below folders that every user may enter: one of pyenv in /root is not",
        look=_open_python,
    ),
    "driver-580": Condition(
        "checkpoints and moves of processes by the driver",
        "a simulated node with driver 580 or later: `VGPU_SIM_DRIVER` unset, 580, 595 or 615",
        look=lambda: _before_branch(580),
    ),
    "no-driver": Condition("a machine without NVML", "a machine without NVIDIA's driver"),
    # programs that ./dev does not install: the tests are `real`
    "podman": installed("podman runc conmon", "containers by vgpu-runtime, CDI and hooks"),
    "runc": installed("runc", "a container's life by vgpu-runtime"),
    "containerd": installed(
        "containerd runc",
        "containerd's shim over vgpu-runtime, pods by its CRI",
        "containerd ctr containerd-shim-runc-v2 runc",
    ),
    "slurm": installed(
        "slurmctld slurmd slurm-client munge",
        "jobs with slices by prolog, task prolog and epilog",
        "slurmctld slurmd srun munged",
    ),
    "chromium": installed("chromium", "draw the status page", " ", _browser),
    "lintian": installed("lintian", "check the Debian packages"),
    "debhelper": installed("dpkg-dev debhelper", "build the Debian packages", "dpkg-buildpackage dh"),
    "machine": installed(
        "mmdebstrap systemd-container uidmap",
        "install, upgrade and purge the packages on a Debian that boots under systemd-nspawn",
        "mmdebstrap systemd-nspawn",
    ),
    "systemd": installed(
        "systemd", "check the unit files and the message catalog", "systemd-analyze journalctl"
    ),
    "seccomp": installed("systemd libseccomp2", "confine a program as the unit says", "systemd-analyze"),
    "musl": installed("musl-tools", "run a program of another C library", "musl-gcc"),
    "mandoc": installed("mandoc", "check the manual pages"),
    "man": installed("man-db groff", "format the manual pages", "man groff"),
    "npm": installed("npm", "check the Grafana dashboard by Grafana's own types", "npm node"),
    "curl": installed("curl", "follow the pages that call curl"),
    "kubectl": installed("kubernetes-client", "follow the pages for a cluster", "kubectl"),
    "kubernetes": Condition(
        "pods on a real cluster of one node",
        "download Kubernetes' server programs, and run `./dev cluster-test --kubernetes FOLDER`",
        real=True,
        look=_kubernetes,
    ),
    "nvidia-tools": Condition(
        "NVIDIA's container toolkit and mig-parted on a simulated node",
        "put `nvidia-ctk` and `nvidia-mig-parted` on the `PATH`, from NVIDIA's packages or releases",
        real=True,
        programs=("nvidia-ctk", "nvidia-mig-parted"),
    ),
    "zsh": installed("zsh", "check the completion script"),
    "fish": installed("fish", "check the completion script, and complete"),
    "apt": Condition(
        "ask apt whether the packages install", "Debian or Ubuntu", (), True, ("apt-get", "dpkg-deb")
    ),
    "debian-archive": fetched(
        "NVIDIA's nvidia-smi and MPS daemons 535 and 550, promtool, containerd 1.7 and 2, Docker 28",
        "x86-64, and an apt that reaches Debian's archive",
    ),
    "python-index": fetched(
        "nvitop, gpustat, the Kubernetes client, Helm, Zig", "a pip that reaches an index of Python packages"
    ),
    "pythons": fetched("load vgpud with Python 3.11, 3.12 and 3.13", "install them, by pyenv for example"),
}


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips the test if a condition is missing. Marks it `real` if one of the conditions is real."""
    unknown = [name for name in names if name not in CONDITIONS]
    if unknown:
        raise ValueError(f"not in tests/conditions.py: {', '.join(unknown)}")
    return pytest.mark.needs(*names)


def unmet(name: str, what: object) -> NoReturn:
    """Skips the running test, which has found that the condition is missing."""
    assert name in CONDITIONS, f"not in tests/conditions.py: {name}"
    pytest.skip(f"{name}: {what}")


def named_by(reason: str) -> str:
    """The condition's name in the reason of a skip by needs() or unmet()."""
    return reason.removeprefix("Skipped: ").partition(":")[0]


def packages() -> list[str]:
    """Debian packages of the real conditions that this machine lacks."""
    lacking = [one for one in CONDITIONS.values() if one.real and one.packages and one.missing()]
    return sorted({package for one in lacking for package in one.packages})


def table() -> str:
    """The table as Markdown."""
    lines = ["| condition | tier | what tests use it for | how to have it |", "|---|---|---|---|"]
    for name, one in CONDITIONS.items():
        how = one.how or f"`apt-get install {' '.join(one.packages)}`"
        lines.append(f"| `{name}` | {'test-all' if one.real else 'test'} | {one.why} | {how} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n".join(packages()) if sys.argv[1:] == ["packages"] else table())

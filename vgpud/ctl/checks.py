"""The checks of `vgpuctl doctor`. Each yields findings (those of problems have a fix) and raises nothing."""

import grp
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vgpud import __version__
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.sockets import SYSTEMD, service
from vgpud.ctl import words
from vgpud.model.device import Health
from vgpud.model.engine import EngineReason
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.marks import MarkKind
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode, State
from vgpud.policy.remote import RemoteSettings
from vgpud.policy.trust import distrust
from vgpud.remote.engine import ENGINES
from vgpud.remote.grants import Grants

OK, WARN, FAIL, SKIP = "ok", "warning", "failed", "skipped"
_CDI_PREFIX = "vgpud.io-vgpu_"  # prefix of the file names of vgpud's CDI specs, as in inject/cdi.py
_LEAST_FREE_BYTES = 64 * 2**20
_LEAST_KERNEL = (5, 4)  # oldest supported kernel; pidfd_open(2) came with Linux 5.3
LEASE_MOUNTS = 32  # as in vgpud.service
_UNITS = ("vgpud.service", "vgpud.socket", "vgpud-ro.socket", "vgpud-admin.socket", "vgpud-runtime.socket")


class Finding(NamedTuple):
    check: str
    state: str
    sentence: str
    fix: str = ""


class Host(NamedTuple):
    """Paths and group of vgpud on this host, from the daemon's settings (VGPUD_*)."""

    run_dir: Path
    state_dir: Path
    cdi_dir: Path
    lib_dir: Path
    arbiter: Path
    mps_control: str
    group: str

    @classmethod
    def of(cls, environment: "os._Environ[str]") -> "Host":
        lib = Path(environment.get("VGPUD_LIB_DIR", "/usr/lib/vgpud"))
        return cls(
            run_dir=Path(environment.get("VGPUD_RUN_DIR", "/run/vgpud")),
            state_dir=Path(environment.get("VGPUD_STATE_DIR", "/var/lib/vgpud")),
            cdi_dir=Path(environment.get("VGPUD_CDI_DIR", "/var/run/cdi")),
            lib_dir=lib,
            arbiter=Path(environment.get("VGPUD_ARBITER", lib / "vgpu-arbiter")),
            mps_control=environment.get("VGPUD_MPS_CONTROL", "nvidia-cuda-mps-control"),
            group=environment.get("VGPUD_GROUP", "vgpu"),
        )


class Node(NamedTuple):
    """The daemon's own view of the node. Without NVML it has no devices."""

    node: pb.NodeReply
    devices: list[pb.Device]
    allocations: list[pb.Allocation]
    processes: list[pb.NodeProcess]
    events: list[pb.Event]


def kernel() -> Iterator[Finding]:
    release = os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if version >= _LEAST_KERNEL:
        yield Finding("kernel", OK, f"Linux {release}")
    else:
        yield Finding("kernel", FAIL, f"Linux {release} has no pidfd", "upgrade to Linux 5.4 or later")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        why = (error.strerror or "").lower()
        yield Finding("pidfd", FAIL, f"pidfd_open fails: {why}", "allow it in the seccomp profile")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        yield Finding("cgroups", OK, "version 2")
    else:
        beside = Path("/sys/fs/cgroup/unified/cgroup.controllers").exists()
        found = "version 2 beside version 1: memory walls work, but" if beside else "version 1:"
        lost = f"{found} systemd does not apply MemoryHigh= of vgpud's unit"
        yield Finding("cgroups", WARN, lost, "boot with systemd.unified_cgroup_hierarchy=1")


def folders(host: Host) -> Iterator[Finding]:
    if not host.run_dir.is_dir():
        yield Finding(
            "run folder", FAIL, f"{host.run_dir} does not exist", f"start it: {service('start') or 'vgpud'}"
        )
    for name, folder in (("run folder", host.run_dir), ("state folder", host.state_dir)):
        try:
            room = os.statvfs(folder)
        except OSError:
            continue  # the folder does not exist, or cannot be read
        free = room.f_bavail * room.f_frsize
        if free < _LEAST_FREE_BYTES:
            yield Finding(name, FAIL, f"{free // 2**20} MiB are free in {folder}", "make room there")
        else:
            yield Finding(name, OK, f"{free // 2**20} MiB are free in {folder}")


def remote(settings: RemoteSettings, certificate: Path) -> Iterator[Finding]:
    """If the policy names a server program of remote slices, checks this program, and the certificate and
    key of the door.
    """
    if not settings.server:
        return
    try:
        found = distrust(Path(settings.server))
    except OSError:
        found = None
    if shutil.which(settings.server) is None:
        fix = f"{ENGINES[settings.engine].how} (docs/remote.md), or correct server in [remote]"
        what = "is not a program" if os.path.lexists(settings.server) else "does not exist"
        what = "is a folder" if Path(settings.server).is_dir() else what
        yield Finding("remote engine", FAIL, f"{settings.server} {what}", fix)
    elif found is not None:
        yield Finding("remote engine", FAIL, found.sentence, found.fix)
    else:
        yield _engine_version(settings)
    for file in (certificate, certificate.with_name("key.pem")):
        try:
            file.stat()
        except FileNotFoundError:
            fix = "make the door's certificate and its key, see docs/remote.md"
            yield Finding("remote door", FAIL, f"{file} does not exist", fix)
        except OSError:
            continue  # root alone sees it
        else:
            yield Finding("remote door", OK, str(file))


def grants(known: Grants) -> Iterator[Finding]:
    """Checks that the file of grants can be read: while it cannot, no session opens."""
    try:
        known.all()
    except VgpuError as error:
        if error.code is not ErrorCode.NOT_ALLOWED:  # root alone sees it
            yield Finding("remote grants", FAIL, error.sentence, error.hint)


def _engine_version(settings: RemoteSettings) -> Finding:
    """Compares the server program with the build that the policy records; without a record, checks
    that it is a server of the engine.
    """
    check, engine, program = "remote engine", ENGINES[settings.engine], Path(settings.server)
    try:
        content = program.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        version = engine.version(program)
    except OSError as error:
        return Finding(check, SKIP, f"cannot read {program}: {(error.strerror or str(error)).lower()}")
    record = f'server_sha256 = "{found}" in [remote]'
    if settings.server_sha256 == found:
        return Finding(check, OK, f"{settings.engine} by {program}, the recorded build {found[:16]}")
    if settings.server_sha256:
        sentence = f"{program} is build {found[:16]}, and {settings.server_sha256[:16]} is recorded"
        fix = f"install the recorded build; or, with its client libraries on all clients, {record}"
        return Finding(check, FAIL, sentence, fix)
    if not version:
        sentence = f"{program} is no server of {settings.engine}, or of an older version"
        starts = f"; if this script starts the server, {record}, which replaces this check"
        return Finding(check, FAIL, sentence, engine.how + (starts if content.startswith(b"#!") else ""))
    sentence = f"{program} is {settings.engine} {version}, and the policy does not record which build"
    return Finding(check, WARN, sentence, f"if it is what you have installed, {record}")


def specs(host: Host) -> Iterator[Finding]:
    """If vgpud runs as root, checks that only root can write to the CDI folder: a container runtime obeys
    every spec in it, and a spec can mount any file of the host.
    """
    try:
        found = distrust(host.cdi_dir) if host.run_dir.stat().st_uid == 0 else None
    except OSError:
        return
    if found is None:
        yield Finding("CDI folder", OK, f"root alone writes to {host.cdi_dir}")
    else:
        yield Finding("CDI folder", FAIL, found.sentence, found.fix)


def subordinate_uids(nsswitch: Path = Path("/etc/nsswitch.conf")) -> Iterator[Finding]:
    """Warns if subordinate uids come from a source that vgpud does not read. With such uids, a user can have
    several quotas.
    """
    try:
        lines = nsswitch.read_text(errors="replace").splitlines()
    except OSError:
        return
    sources = next((line.split()[1:] for line in lines if line.startswith("subid:")), [])
    if any(one != "files" for one in sources):
        yield Finding(
            "subordinate uids",
            WARN,
            f"{nsswitch} takes subordinate uids from {' '.join(sources)}, and vgpud reads only /etc/subuid",
            "copy the ranges there, or let the first [[quota]] go by groups: it refuses uids without account",
        )


def sockets(host: Host) -> Iterator[Finding]:
    """Checks the modes of the sockets (wider modes let other users connect) and the group of tenants."""
    for name, mode in (("ro.sock", 0o666), ("vgpud.sock", 0o660), ("admin.sock", 0o600)):
        path = host.run_dir / name
        try:
            found = path.stat()
        except OSError:
            fix = f"start it: {service('start') or 'vgpud'}"
            yield Finding("sockets", FAIL, f"{path} does not exist", fix)
            continue
        wider = stat.S_IMODE(found.st_mode) & ~mode
        if wider:
            sentence = f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, wider than {mode:04o}"
            yield Finding("sockets", FAIL, sentence, f"chmod {mode:04o} {path}")
        else:
            yield Finding("sockets", OK, f"{name} {stat.S_IMODE(found.st_mode):04o}")
    yield from _group(host)


def _group(host: Host) -> Iterator[Finding]:
    if not host.group:
        return
    try:
        gid = grp.getgrnam(host.group).gr_gid
    except KeyError:
        fix = f"groupadd --system {host.group}, or install the package anew"
        yield Finding("group", FAIL, f"there is no group {host.group}", fix)
        return
    if os.geteuid() != 0 and gid not in os.getgroups():
        fix = f"usermod -aG {host.group} {_own_name()}, then log in again"
        yield Finding("group", WARN, f"you are not in group {host.group}, so you can only read", fix)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # the user has no account, or the directory service does not answer
        return "USER"


def programs(host: Host) -> Iterator[Finding]:
    for name, path, package in (
        ("libvgpu", host.lib_dir / "libvgpu.so", "libvgpu"),
        ("arbiter", host.arbiter, "vgpud"),
    ):
        if path.exists():
            yield Finding(name, OK, str(path))
        else:
            sentence = f"{path} is missing, and mode preload needs it"
            yield Finding(name, FAIL, sentence, f"install the package {package} anew")


def mps(host: Host, simulated: bool) -> Iterator[Finding]:
    """Looks for nvidia-cuda-mps-control on the PATH. A simulated node has its own copy, which only the daemon
    needs to find.
    """
    control = shutil.which(host.mps_control)
    if control or simulated:
        yield Finding("mps", OK, control or "the simulated node's")
    else:
        fix = "install it with the driver (Debian: nvidia-cuda-mps)"
        yield Finding("mps", WARN, f"{host.mps_control} is not in PATH, and mode mps needs it", fix)


def units() -> Iterator[Finding]:
    if not SYSTEMD.is_dir():
        yield Finding("units", SKIP, "systemd does not run here")
        return
    for unit in _UNITS:
        asked = ["systemctl", "is-active", unit]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        state = done.stdout.strip() or "unknown"
        if state == "active":
            yield Finding("units", OK, f"{unit} is active")
        else:
            yield Finding(
                "units", FAIL, f"{unit} is {state}", f"systemctl start {unit}; journalctl -u {unit}"
            )


def leases(host: Host, held: Iterable[str]) -> Iterator[Finding]:
    """Checks that the leases of users are on file systems of their own (vgpud/lease/homes.py)."""
    tenants = host.run_dir / "tenants"
    mounted = sum(os.path.ismount(tenants / str(number)) for number in range(LEASE_MOUNTS))
    folders = [host.run_dir / "leases" / allocation for allocation in sorted(held)]
    shared = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    if not SYSTEMD.is_dir():
        return  # another finding says so
    if not mounted:
        sentence = f"no file systems are mounted in {tenants}: one tenant can use up the room of all leases"
        fix = "systemctl restart vgpud.service; journalctl -u vgpud.service says why a mount fails"
        yield Finding("leases", WARN, sentence, fix)
    elif shared:
        old = counted(len(shared), "lease")
        sentence = f"{old} of an earlier version without a file system of its own: {shared[0].name}"
        yield Finding("leases", WARN, sentence, "release these allocations and make them anew, or reboot")
    else:
        yield Finding("leases", OK, f"{mounted} file systems for leases in {tenants}")


_UNSIMULATE = "where there is one: apt remove vgpud-sim, or start vgpud without VGPU_SIM_STATE"


def driver(node: pb.NodeReply) -> Iterator[Finding]:
    if node.hardware_error:
        yield Finding(
            "driver", FAIL, node.hardware_error, "install or load the NVIDIA driver: modprobe nvidia"
        )
    elif node.simulated:
        yield Finding("driver", WARN, "SIMULATED: no real GPU is behind this daemon", _UNSIMULATE)
    else:
        yield Finding("driver", OK, f"driver {node.driver_version}, CUDA {node.cuda_version}")
        yield from _loaded_module(node.driver_version)
    if node.vgpud_version == __version__:
        yield Finding("version", OK, f"vgpud {node.vgpud_version}")
    else:
        sentence = f"vgpud is {node.vgpud_version} and vgpuctl {__version__}"
        yield Finding("version", WARN, sentence, "restart vgpud after an upgrade")


def _loaded_module(version: str) -> Iterator[Finding]:
    """Reports a loaded kernel module (/proc/driver/nvidia/version) of another version than NVML's
    library.
    """
    try:
        loaded = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return
    if version not in loaded:
        sentence = f"the loaded kernel module is another than the library's {version}"
        yield Finding("driver", FAIL, sentence, "reload the module, or reboot")


_UNMOVABLE = (Mode.MIG, Mode.MPS)


def devices(found: Iterable[pb.Device]) -> Iterator[Finding]:
    for item in found:
        name = f"device {item.index}"
        if item.health == Health.OK and item.health_reason:
            yield Finding(name, WARN, item.health_reason, "reset it when it is idle")
        elif item.health == Health.SICK:
            stay = f"its tenants ('vgpuctl ls --device {item.index}') cannot be moved: wait for their end, "
            leave = stay if item.mode in _UNMOVABLE else ""
            drain = f"vgpuctl drain {item.index}{'' if leave else ' --move'}"
            fix = f"{leave}'{drain}', then what NVML asks for; afterwards it is open again"
            yield Finding(name, FAIL, f"it is sick: {item.health_reason}", fix)
        elif item.health != Health.OK:
            fix = "look for NVRM and Xid in 'journalctl -k'; nvidia-smi --gpu-reset, or reboot"
            yield Finding(name, FAIL, f"it is {item.health}: {item.health_reason}", fix)
        elif item.mig.current != item.mig.pending:
            pending = "on" if item.mig.pending else "off"
            fix = f"drain it ('vgpuctl drain {item.index}'), then nvidia-smi --gpu-reset -i {item.index}"
            yield Finding(name, WARN, f"MIG mode becomes {pending} at its next reset", fix)
        elif item.compute_mode == "prohibited":
            fix = f"nvidia-smi -i {item.index} -c DEFAULT"
            yield Finding(name, WARN, "its compute mode is prohibited, which lets no process use it", fix)
        else:
            drained = ", drained" if item.drained else ""
            yield Finding(name, OK, f"{item.name}, {item.mode or 'idle'}{drained}")


def engines(found: Iterable[pb.Device]) -> Iterator[Finding]:
    """The engine of each device; a warning if the driver refuses the requested one, or its probe failed."""
    for item in found:
        sentence = f"device {item.index}: {item.engine}, {item.engine_why}"
        if item.engine_reason in (EngineReason.REFUSED, EngineReason.PROBE_FAILED):
            fix = 'see docs/compute.md; engine = "gate" in [device.preload] asks for no other'
            yield Finding("engine", WARN, sentence, fix)
        elif item.engine:
            yield Finding("engine", OK, sentence)


_SILENT_FIXES: dict[str, str] = {
    Mode.PRELOAD: "wait: vgpud starts it again by itself, and 'vgpuctl events' tells when; tenants run on",
    Mode.MPS: "see 'vgpuctl mps ls'",
}


def tenants(node: Node) -> Iterator[Finding]:
    failed = [item for item in node.allocations if item.state == State.FAILED]
    for item in failed:
        yield Finding(
            "allocations", FAIL, f"{item.id} has failed: {item.failure}", f"vgpuctl release {item.id}"
        )
    yield from _marks(node.allocations)
    if node.node.arbiter_error:
        yield Finding("helper", FAIL, node.node.arbiter_error, _SILENT_FIXES[Mode.PRELOAD])
    told = {"", Mode.PRELOAD.value} if node.node.arbiter_error else {""}
    for mode in sorted({item.silent_mode for item in node.processes} - told):
        fix = _SILENT_FIXES.get(mode, "see the log of vgpud")
        yield Finding("helper", FAIL, words.silent(mode), fix)
    outside = [item for item in node.processes if not (item.allocation_id or item.silent_mode)]
    for process in outside:
        sentence = f"process {process.pid} uses {process.device_uuid} outside vgpud"
        yield Finding("outside", WARN, sentence, "end it, or let the policy leave the device unmanaged")
    dead = [i for i in node.allocations if i.bound_pid and not Path(f"/proc/{i.bound_pid}").exists()]
    for item in dead:
        sentence = f"{item.id} is bound to process {item.bound_pid}, which is gone"
        yield Finding("leaks", WARN, sentence, f"see what still runs in it: vgpuctl show {item.id}")
    if not failed and not dead:
        yield Finding("allocations", OK, f"{len(node.allocations)} held, none failed")


def _marks(allocations: Iterable[pb.Allocation]) -> Iterator[Finding]:
    """Warns of tenants that have a mark. A driver newer than libvgpu is reported once for all tenants."""
    told = set()
    for item in allocations:
        for mark in item.marks:
            if mark.kind == MarkKind.GATED:
                fix = "see docs/compute.md; a restart of vgpud-arbiter tries the engine cut again"
                yield Finding("engine", WARN, f"{item.id} is {mark.kind}: {mark.sentence}", fix)
            elif mark.kind == MarkKind.NO_WALL:
                fix = 'see docs/modes.md, "Memory walls"'
                yield Finding("memory walls", WARN, f"{item.id}: {mark.sentence}", fix)
            elif mark.kind != MarkKind.UNKNOWN_CALLS:
                fix = f"see whose it is: vgpuctl show {item.id}; on_bypass in the policy can end it"
                yield Finding("limits", WARN, f"{item.id} is {mark.kind}: {mark.sentence}", fix)
            elif mark.subject not in told:
                told.add(mark.subject)
                yield Finding(
                    "libvgpu", WARN, mark.sentence, "upgrade vgpud to a version that knows this driver"
                )


def leftovers(host: Host, held: frozenset[str]) -> Iterator[Finding]:
    """Warns of CDI specs and leases that no allocation owns. vgpud removes them at its next start."""
    specs = {
        p.name.removeprefix(_CDI_PREFIX).removesuffix(".json")
        for p in _glob(host.cdi_dir, f"{_CDI_PREFIX}*.json")
    }
    leases = {p.name for p in _glob(host.run_dir / "leases", "*") if not p.name.startswith(".")}
    for what, names, folder in (
        ("specs", specs, host.cdi_dir),
        ("leases", leases, host.run_dir / "leases"),
    ):
        stale = sorted(names - held)
        if stale:
            shown = ", ".join(stale[:4]) + (" ..." if len(stale) > 4 else "")
            sentence = f"{len(stale)} in {folder} belong to no allocation ({shown})"
            yield Finding(what, WARN, sentence, "a restart of vgpud clears them; tenants run on")
        else:
            yield Finding(what, OK, f"{len(names)} in {folder}, all owned")


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def clock(node: Node, now_unix_ns: int) -> Iterator[Finding]:
    latest = max((item.unix_ns for item in node.events), default=0)
    ahead = (latest - now_unix_ns) / 1e9
    if ahead > 1:
        sentence = f"the last event is {ahead:.0f} s in the future: the clock was set back"
        yield Finding("clock", WARN, sentence, "see timedatectl; leases and turns do not depend on it")
    else:
        yield Finding("clock", OK, "no event is in the future")

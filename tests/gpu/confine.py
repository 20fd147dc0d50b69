"""The restrictions of systemd/vgpud.service without systemd, as far as Linux gives them to a root program.

    python -m tests.gpu.confine prepare FILE                where systemd-analyze and libseccomp are
    python -m tests.gpu.confine run FILE --writable FOLDER ... -- COMMAND ...     as root, anywhere

`prepare` reads the unit and compiles its seccomp filters, so `run` needs neither systemd nor libseccomp.
Each line of [Service] is applied, is not a restriction (IGNORED), or needs systemd (NOT_HERE, which `run`
prints). Any other line is an error, so this program follows the unit. systemd.exec(5) says what each
line does; the filters are those of systemd 252.
"""

import base64
import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd" / "vgpud.service"
IGNORED = {
    *(
        "Type",
        "ExecStart",
        "ExecReload",
        "Sockets",
        "WatchdogSec",
        "TimeoutStartSec",
        "Restart",
        "RestartSec",
    ),
    *("RestartPreventExitStatus", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"),
    *("StateDirectory", "ExecStartPre", "ReadWritePaths"),
    *("StateDirectoryMode", "ConfigurationDirectory", "KillMode", "OOMPolicy", "OOMScoreAdjust"),
    *("LogRateLimitIntervalSec", "LogRateLimitBurst"),
}
NOT_HERE = {
    "DevicePolicy": "a BPF program of the cgroup",
    "DeviceAllow": "a BPF program of the cgroup",
    "IPAddressDeny": "a BPF program of the cgroup",
    "IPAddressAllow": "a BPF program of the cgroup",
    "MemoryHigh": "a limit of the cgroup",
    "MemoryMax": "a limit of the cgroup",
}
PROTECTED_HOMES = ("/home", "/root", "/run/user")
TUNABLES = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/sys")
LOGS = ("/dev/kmsg", "/proc/kmsg")
APPLIED = {
    *("NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem", "ProtectHome", "ProtectClock"),
    *("ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules"),
    *(
        "ProtectKernelTunables",
        "PrivateMounts",
        "PrivateNetwork",
        "PrivateTmp",
        "KeyringMode",
        "LockPersonality",
        "UMask",
    ),
    *("MemoryDenyWriteExecute", "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime"),
    *(
        "RestrictSUIDSGID",
        "SystemCallArchitectures",
        "SystemCallFilter",
        "SystemCallErrorNumber",
        "LimitNOFILE",
    ),
}
#: from linux/capability.h
CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "MKNOD": 27,
}
#: from bits/socket.h
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
LAST_FAMILY = 45
# from seccomp.h of libseccomp
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
NE, EQ, MASKED_EQ = 1, 4, 7
EPERM, EAFNOSUPPORT = 1, 97
# from linux/prctl.h, linux/mount.h, linux/sched.h and linux/keyctl.h
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 22, 24, 38, 65
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
NEW_MOUNTS, NEW_UTS, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
MOUNT_ATTR_RDONLY, AT_RECURSIVE, AT_FDCWD = 1, 0x8000, -100
SYS_MOUNT_SETATTR = 442
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}

libc = ctypes.CDLL(None, use_errno=True)


def directives() -> dict[str, list[str]]:
    """The settings of [Service]: key -> words. Repeated keys are joined."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).extend(value.split())
    unknown = set(found) - IGNORED - APPLIED - set(NOT_HERE)
    if unknown:
        raise ValueError(
            f"{UNIT.name} has {', '.join(sorted(unknown))}: teach {Path(__file__).name} what it is"
        )
    return found


def expand(group: str) -> set[str]:
    """The system calls of a group such as @system-service, including those of nested groups."""
    if not group.startswith("@"):
        return {group}
    words = ["systemd-analyze", "syscall-filter", group]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    names = [line.strip() for line in text.splitlines()[1:] if line.strip() and "#" not in line]
    return set().union(*(expand(name) for name in names))


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Filter:
    """One seccomp filter, made with libseccomp."""

    def __init__(self, default: int) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2")
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(default)))

    def rule(self, action: int, call: str, *compares: tuple[int, int, int, int]) -> None:
        """Adds a rule, unless this architecture lacks the call. A comparison is (argument number, operator,
        a, b).
        """
        number = self._library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return
        given = (_Compare * len(compares))(*(_Compare(*one) for one in compares))
        failed = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(compares), given
        )
        if failed:
            raise OSError(-failed, f"seccomp: {call}")

    def compiled(self) -> str:
        with os.fdopen(os.memfd_create("bpf"), "rb") as file:
            failed = self._library.seccomp_export_bpf(self._context, file.fileno())
            if failed:
                raise OSError(-failed, "seccomp_export_bpf")
            file.seek(0)
            return base64.b64encode(file.read()).decode()


def filters(unit: dict[str, list[str]]) -> Iterator[Filter]:
    """The filters of systemd 252. A call is allowed if every filter allows it."""
    refused = ERRNO | EPERM
    allowed: set[str] = expand("@default")
    for word in unit["SystemCallFilter"]:
        allowed = allowed - expand(word[1:]) if word.startswith("~") else allowed | expand(word)
    calls = Filter(refused)
    for call in sorted(allowed):
        calls.rule(ALLOW, call)
    yield calls
    families = Filter(ALLOW)
    for number in set(range(LAST_FAMILY + 1)) - {FAMILIES[name] for name in unit["RestrictAddressFamilies"]}:
        families.rule(ERRNO | EAFNOSUPPORT, "socket", (0, EQ, number, 0))
    yield families
    rest = Filter(ALLOW)
    for flag in NAMESPACES:
        for call, argument in (("unshare", 0), ("clone", 0), ("setns", 1)):
            rest.rule(refused, call, (argument, MASKED_EQ, flag, flag))
    rest.rule(ERRNO | 38, "clone3")
    rest.rule(refused, "setns", (1, EQ, 0, 0))
    rest.rule(refused, "mmap", (2, MASKED_EQ, 6, 6))
    rest.rule(refused, "mprotect", (2, MASKED_EQ, 4, 4))
    rest.rule(refused, "pkey_mprotect", (2, MASKED_EQ, 4, 4))
    rest.rule(refused, "shmat", (2, MASKED_EQ, 0o100000, 0o100000))
    rest.rule(refused, "personality", (0, NE, 0, 0))
    for policy in (1, 2, 6):  # SCHED_FIFO, SCHED_RR, SCHED_DEADLINE
        rest.rule(refused, "sched_setscheduler", (1, EQ, policy, 0))
    for bit in (0o4000, 0o2000):
        for call, argument in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mknod", 1), ("mknodat", 2)):
            rest.rule(refused, call, (argument, MASKED_EQ, bit, bit))
    yield rest


def prepare(file: Path) -> None:
    unit = directives()
    compiled = [one.compiled() for one in filters(unit)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": platform.machine(), "unit": unit, "filters": compiled}))


def _checked(what: str, result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = (word.encode() if word is not None else None for word in (source, target, kind))
    _checked(f"mount {target}", libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None))


def _writable(path: str, allowed: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(*((0, MOUNT_ATTR_RDONLY) if allowed else (MOUNT_ATTR_RDONLY, 0)), 0, 0)
    done = libc.syscall(
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        path.encode(),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    _checked(f"mount_setattr {path}", done)


def _bind(path: str, allowed: bool) -> None:
    """Makes the path a mount of its own, writable or read-only."""
    _mount(path, path, None, MS_BIND | MS_REC)
    _writable(path, allowed)


def _holds_the_tree(folder: str) -> bool:
    return any(Path(kept).is_relative_to(folder) for kept in (ROOT, sys.prefix, sys.base_prefix))


def enter_own_root() -> None:
    """Makes `/` a mount that only this process sees. In a chroot `/` is no mount, and its flags could not be
    changed.

    `/` is bound over /proc, which is a mount in every root. /proc is made private first, so no other
    process sees this.
    """
    here = Path.cwd()
    _checked("unshare", libc.unshare(NEW_MOUNTS))
    _mount("none", "/proc", None, MS_PRIVATE)
    _mount("/", "/proc", None, MS_BIND | MS_REC)
    os.chroot("/proc")
    os.chdir("/")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.chdir(here)


def mounts(writable: list[str]) -> list[str]:
    """Sets up the unit's view of the file system. Returns the paths that stay open for this source tree."""
    enter_own_root()
    _checked("unshare", libc.unshare(NEW_UTS | NEW_NETWORK))
    kept: list[str] = []
    held = {path: os.open(path, os.O_PATH) for path in writable}
    for folder in (*PROTECTED_HOMES, "/tmp", "/var/tmp"):
        if not Path(folder).is_dir():
            continue
        if _holds_the_tree(folder):
            kept.append(folder)
        else:
            _mount("tmpfs", folder, "tmpfs", 0, "mode=1777" if folder.endswith("tmp") else "mode=0")
    for path, descriptor in held.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    _writable("/", False)
    for path in (*writable, "/dev", "/proc", "/tmp", "/var/tmp"):
        if path in kept:
            _bind(path, True)
        else:
            _writable(path, True)
    for path in TUNABLES:
        if Path(path).exists():
            _bind(path, False)
    for path in LOGS:
        if Path(path).exists():
            _mount("/dev/null", path, None, MS_BIND)
    modules = Path("/usr/lib/modules")
    if modules.is_dir():
        _mount("tmpfs", str(modules), "tmpfs", 0, "mode=0")
    return kept


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def seccomp(compiled: str) -> None:
    code = base64.b64decode(compiled)
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    _checked("seccomp", libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))


def confine(prepared: dict[str, object], writable: list[str]) -> list[str]:
    """Confines this process and its future children. Returns the restrictions that this machine lacks.

    Raises ValueError if the file was prepared for another machine or another unit.
    """
    unit = directives()
    if (prepared["machine"], prepared["unit"]) != (platform.machine(), unit):
        raise ValueError("prepared for another kind of machine or from another unit: prepare it again")
    missing = [f"{name} ({why})" for name, why in NOT_HERE.items()]
    try:
        missing += [
            f"ProtectHome or PrivateTmp for {folder} (this tree lies there)" for folder in mounts(writable)
        ]
    except PermissionError as error:
        missing.append(f"ProtectSystem and all that is mounted ({error})")
    files = min(int(unit["LimitNOFILE"][0]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.umask(int(unit["UMask"][0], 8))
    # 1: KEYCTL_JOIN_SESSION_KEYRING
    _checked("keyctl", libc.syscall(SYS_KEYCTL[platform.machine()], 1, None))
    keep = {CAPABILITIES[name.removeprefix("CAP_")] for name in unit["CapabilityBoundingSet"]}
    try:
        for number in set(range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1)) - keep:
            _checked("capability", libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0))
    except PermissionError as error:
        missing.append(f"CapabilityBoundingSet ({error})")
    # needs Linux 6.3; a seccomp filter has the same effect on older kernels
    libc.prctl(PR_SET_MDWE, 1, 0, 0, 0)
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    loaded = prepared["filters"]
    assert isinstance(loaded, list)
    # the first filter forbids loading further filters, so it is loaded last
    for compiled in reversed(loaded):
        seccomp(compiled)
    return missing


def run(words: list[str]) -> NoReturn:
    split = words.index("--")
    options, command = words[1:split], words[split + 1 :]
    writable = [
        value for name, value in zip(options[::2], options[1::2], strict=True) if name == "--writable"
    ]
    for what in confine(json.loads(Path(words[0]).read_text()), writable):
        print(f"not applied: {what}", file=sys.stderr)
    os.execvp(command[0], command)


def main(words: list[str]) -> int:
    if words[:1] == ["prepare"] and len(words) == 2:
        prepare(Path(words[1]))
        return 0
    if words[:1] == ["run"] and "--" in words:
        run(words[1:])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`vgpuctl bug-report`: collects facts for a bug report, without the names of this host and its users."""

import io
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from vgpud import __version__
from vgpud.ctl.connect import connect
from vgpud.ctl.document import plain
from vgpud.ctl.redact import redact, without_private
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import ErrorCode, Exit, VgpuError

_MOST_BYTES = 4 * 2**20  # maximum of bytes of a command's output, of which the end is kept
_SECONDS = 20
_FIRST_HUMAN_UID = 1000

# Commands whose output the report contains. For a command that is not installed, the report says so.
_COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("journal.txt", ("journalctl", "-u", "vgpud*", "-n", "3000", "--no-pager", "-o", "short-precise")),
    ("kernel.txt", ("journalctl", "-k", "-n", "500", "--no-pager", "-g", "NVRM|Xid|nvidia")),
    ("units.txt", ("systemctl", "status", "--no-pager", "vgpud*", "nvidia*")),
    ("unit.txt", ("systemctl", "cat", "--no-pager", "vgpud.service")),
    ("nvidia-smi.txt", ("nvidia-smi", "-q")),
    ("mounts.txt", ("findmnt", "-n", "-o", "TARGET,FSTYPE,OPTIONS", "/run", "/dev/shm", "/sys/fs/cgroup")),
)


def bug_report(arguments: Namespace, terminal: Terminal) -> int:
    """Writes the bug report. If a part cannot be collected, the report contains the reason in its place."""
    names = private_names()
    parts = {name: redact(text, names) for name, text in collect(arguments).items()}
    if arguments.file == "-":
        for name, text in parts.items():
            print(f"==== {name}\n{text}")
        return Exit.OK.value
    path = Path(arguments.file or f"vgpud-bug-report-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    try:
        write(path, parts)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        why = "it exists, and is not overwritten" if exists else (error.strerror or str(error)).lower()
        raise VgpuError(
            ErrorCode.BAD_REQUEST, f"cannot write {path}: {why}", "name another with --file"
        ) from None
    document = {"file": str(path), "parts": list(parts)}
    if not terminal.is_text:
        terminal.show(View("BugReport", document, [str(path)], []))
    else:
        terminal.say(f"wrote {path}: look through it before you send it")
    return Exit.OK.value


def private_names() -> list[tuple[str, str]]:
    host = platform.node()
    names = [(host, "HOST"), (host.partition(".")[0], "HOST")]
    for entry in pwd.getpwall():
        if entry.pw_uid >= _FIRST_HUMAN_UID and entry.pw_name != "nobody":
            names.append((entry.pw_name, f"user{entry.pw_uid}"))
    return names


def collect(arguments: Namespace) -> dict[str, str]:
    from vgpud.ctl.doctor import examine
    from vgpud.ctl.policy_files import on_disk
    from vgpud.policy.effective import effective

    parts = {"versions.txt": _versions()}
    sources: tuple[tuple[str, Callable[[], object]], ...] = (
        ("doctor.json", lambda: [item._asdict() for item in examine(arguments)]),
        ("policy-on-disk.json", lambda: effective(on_disk().policy)),
    )
    with connect(arguments) as client:
        sources += (
            ("node.json", lambda: plain(client.get_node())),
            ("devices.json", lambda: plain(client.list_devices())),
            ("allocations.json", lambda: plain(client.list_allocations())),
            ("usage.json", lambda: plain(client.get_usage())),
            ("processes.json", lambda: plain(client.list_processes())),
            ("events.json", lambda: plain(client.list_events(1000))),
            ("policy.json", lambda: json.loads(client.get_policy().json)),
            ("mps.json", lambda: plain(client.list_mps())),
            ("mig.json", lambda: plain(client.list_mig())),
        )
        for name, source in sources:
            parts[name] = _part(source)
    for name, words in _COMMANDS:
        parts[name] = _run(words)
    return parts


def _part(source: Callable[[], object]) -> str:
    try:
        return json.dumps(without_private(source()), indent=1)
    except VgpuError as error:
        return f"cannot be collected: {error}"


def _versions() -> str:
    uname = platform.uname()
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        system = "unknown"
    return "\n".join(
        (
            f"vgpuctl {__version__}",
            f"python {sys.version}",
            f"kernel {uname.release} {uname.version} {uname.machine}",
            f"system {system}",
            f"cpus {os.cpu_count()}",
        )
    )


def _run(words: tuple[str, ...]) -> str:
    if shutil.which(words[0]) is None:
        return f"{words[0]} is not installed"
    try:
        done = subprocess.run(words, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]} failed: {error}"
    return (done.stdout + done.stderr)[-_MOST_BYTES:].decode(errors="replace")


def write(path: Path, parts: dict[str, str]) -> None:
    """Writes the report's archive with mode 0600. Raises OSError, also if the file exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"vgpud-bug-report/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))

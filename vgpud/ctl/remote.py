"""The verbs of `vgpuctl remote`: run and status on a machine without a GPU, and grants on the node."""

import asyncio
import os
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vgpud.ctl import arguments as kinds
from vgpud.ctl.fail import exec_error, print_error
from vgpud.ctl.table import Column, Table
from vgpud.ctl.terminal import Terminal, View
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import format_bytes, show_bytes
from vgpud.remote import certificates, wire
from vgpud.remote import client as remote_client
from vgpud.remote import grants as node
from vgpud.remote.client import Place
from vgpud.remote.engine import DEFAULT_LIBRARY, ENGINES

TOKEN_VARIABLE = "VGPU_REMOTE_TOKEN"  # noqa: S105 - the name of a variable
LIBRARY_VARIABLE = "VGPU_REMOTE_LIBRARY"
TOKEN_FILE = Path("~/.config/vgpud/remote-token")


def run(arguments: Namespace, terminal: Terminal) -> int:
    """Runs a command with a slice of another machine's GPU. The exit code is the command's."""
    command: list[str] = arguments.command
    if not command:
        hint = "write it after --, as in 'vgpuctl remote run HOST --memory 4GiB -- python train.py'"
        raise VgpuError(ErrorCode.BAD_REQUEST, "no command to run", hint)
    place = _place(arguments, terminal)
    wanted = wire.Open(
        token=place.token,
        memory="" if arguments.memory is None else format_bytes(arguments.memory),
        cores="" if arguments.cores is None else f"{arguments.cores.value:g}",
        isolation=arguments.isolation or "",
        priority=arguments.priority or "",
        label=arguments.label or "",
    )
    folder = Path.cwd() / (arguments.library or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY)
    library = str(folder)  # the program may change its folder
    if not any((folder / one.library).is_file() for one in ENGINES.values()):
        hint = f"install the engine's client there, or name its folder by --library or {LIBRARY_VARIABLE}"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"the engine's libraries are not in {library}", hint)
    tell = partial(print_error, terminal=terminal)
    try:
        return asyncio.run(remote_client.run(place, wanted, library, command, os.environ, tell))
    except OSError as error:
        raise exec_error(command[0], error) from None


def status(arguments: Namespace, terminal: Terminal) -> int:
    """Lists the caller's sessions on another machine."""
    found = asyncio.run(remote_client.status(_place(arguments, terminal)))
    sessions = found["sessions"]
    table = Table(
        (Column("ALLOCATION"), Column("ADDRESS"), Column("CONNECTIONS"), Column("BYTES"), Column("STATE")),
        [
            (
                str(one["allocation"]),
                str(one["address"]),
                str(one["connections"]),
                show_bytes(int(one["bytes"])) if one["bytes"] else "0",
                "connected" if one["connected"] else "client left",
            )
            for one in sessions
        ],
    )
    document = {"user": found["user"], "sessions": sessions}
    terminal.show(View("RemoteStatus", document, [str(one["allocation"]) for one in sessions], [table]))
    return 0


def _place(arguments: Namespace, terminal: Terminal) -> Place:
    """Returns the door's address and the caller's credentials. Raises VgpuError(BAD_REQUEST)."""
    if bool(arguments.certificate) != bool(arguments.key):
        missing = "--key" if arguments.certificate else "--certificate"
        hint = "give both: the certificate's file and its key's"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{missing} is missing", hint)
    return Place(
        arguments.host,
        token="" if arguments.certificate else _token(arguments.token_file, terminal),
        certificate=Path(arguments.certificate) if arguments.certificate else None,
        key=Path(arguments.key) if arguments.key else None,
        authority=Path(arguments.ca) if arguments.ca else None,
    )


def _token(file: str | None, terminal: Terminal) -> str:
    """Returns the token from the file given as an option, else the variable, else the file in the home
    folder.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    if given and file is None:
        return _checked(given, TOKEN_VARIABLE)
    path = (Path(file) if file else TOKEN_FILE).expanduser()
    try:
        text = path.read_text()
        is_open = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        said = (getattr(error, "strerror", "") or "it is not text").lower()
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"there is no token: {path}: {said}",
            f"put what 'vgpuctl remote grant' printed into {TOKEN_FILE} or {TOKEN_VARIABLE}",
        ) from None
    if is_open:
        terminal.say(f"others may read the token in {path}: chmod 600 {path}")
    return _checked(text, str(path))


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        hint = "put what 'vgpuctl remote grant' printed there"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{where} is empty", hint)
    if len(token.split(".")) != 3 or not token.isprintable() or len(token) > wire.TEXT_BYTES:
        hint = "a token has three parts with dots between them, as 'vgpuctl remote grant' prints it"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"what {where} has is not a token", hint)
    lengths = tuple(len(part) for part in token.split("."))
    if lengths != node.TOKEN_CHARACTERS:
        sentence = f"the token of {where} is not whole: its parts have {_counts(lengths)} characters, "
        sentence += f"and those of a token {_counts(node.TOKEN_CHARACTERS)}"
        raise VgpuError(ErrorCode.BAD_REQUEST, sentence, "copy all that 'vgpuctl remote grant' printed")
    return token


def _counts(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


# --- on the node


def grant(arguments: Namespace, terminal: Terminal) -> int:
    """Makes a grant for a token or a certificate. Prints the token, which the node does not store."""
    uid, gid, name = _account(arguments.user)
    now = int(time.time())
    known, certificate = node.of_this_node()
    own = _fingerprint_of_door(certificate)
    by_certificate = (
        certificates.client_fingerprint(Path(arguments.certificate), own, now)
        if arguments.certificate
        else ""
    )
    wanted = node.Grant(
        id="",
        user=name,
        uid=uid,
        gid=gid,
        created=now,
        certificate_sha256=by_certificate,
        expires=None if arguments.expires is None else now + int(arguments.expires),
        max_memory_bytes=arguments.memory,
        max_cores_percent=None if arguments.cores is None else arguments.cores.value,
        max_sessions=arguments.sessions,
    )
    if not own and not by_certificate:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            "vgpud-remote.service has no certificate yet, and a token contains the digest of it",
            f"make {certificate} first (docs/remote.md)",
        )
    made, token = known.add(wanted, "" if by_certificate else own)
    _record(f"remote grant {made.id} of {made.user} made")
    if lacks := _left_open(made):
        terminal.say(lacks)
    if not _has_server():
        terminal.say("this node makes no remote slices until server of [remote] is set")
    if terminal.is_machine:
        terminal.show(View("RemoteGrant", {"id": made.id, "user": made.user, "token": token}, [made.id], []))
    elif token:
        terminal.say(f"grant {made.id} of {made.user}; its token is shown this once:")
        sys.stdout.write(f"{token}\n")
    else:
        terminal.say(f"grant {made.id} of {made.user}, for the certificate {by_certificate[:16]}")
    return 0


def _has_server() -> bool:
    """False if the policy names no engine's server. True for a policy that cannot be read."""
    from vgpud.ctl.policy_files import on_disk

    try:
        return bool(on_disk().policy.remote.server)
    except VgpuError:
        return True


def _fingerprint_of_door(certificate: Path) -> str:
    """Returns the SHA-256 of the door's certificate; "" if the file does not exist. Raises VgpuError."""
    try:
        certificate.stat()
    except FileNotFoundError:
        return ""
    except OSError:
        pass  # fingerprint_of raises the error
    return certificates.fingerprint_of(certificate)


def _left_open(made: node.Grant) -> str:
    """Returns a sentence about the limits that a grant does not have; "" if it has all."""
    bounds = {"memory": made.max_memory_bytes, "cores": made.max_cores_percent, "sessions": made.max_sessions}
    missing = ", ".join(name for name, bound in bounds.items() if bound is None)
    lacks = ["no expiry"] if made.expires is None else []
    lacks += [f"no bounds of its own on {missing}"] if missing else []
    return f"grant {made.id} has {' and '.join(lacks)}" if lacks else ""


def _record(change: str) -> None:
    """Writes a change of the grants to syslog (facility authpriv)."""
    import syslog

    syslog.openlog("vgpuctl", 0, syslog.LOG_AUTHPRIV)
    syslog.syslog(f"{change} by uid {os.getuid()}")


def _account(user: str) -> tuple[int, int, str]:
    """The uid, gid and name of an account of this host, by name or uid. Raises VgpuError(BAD_REQUEST) if
    there is no such account, or if its uid or primary group gives access to vgpud's sockets.
    """
    import pwd

    try:
        account = pwd.getpwuid(kinds.uid(user))
    except (ArgumentTypeError, KeyError):
        hint = "name an account of this node, or its uid"
        raise VgpuError(ErrorCode.BAD_REQUEST, f"this host has no user {user!r}", hint) from None
    found = account.pw_uid, account.pw_gid, account.pw_name
    if found[0] == 0 or found[1] == node.group_of_tenants():
        sentence = f"the programs of a remote user may not run as {found[2]}, who may open vgpud's sockets"
        hint = "name an account for remote users: useradd --system --shell /usr/sbin/nologin gpu-remote"
        raise VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
    return found


def grants(arguments: Namespace, terminal: Terminal) -> int:
    known = node.of_this_node()[0].all()
    now = time.time()
    table = Table(
        tuple(Column(one) for one in ("GRANT", "USER", "BY", "MEMORY", "CORES", "SESSIONS", "EXPIRES")),
        [
            (
                one.id,
                one.user,
                f"certificate {one.certificate_sha256[:16]}" if one.certificate_sha256 else "token",
                "-" if one.max_memory_bytes is None else show_bytes(one.max_memory_bytes),
                "-" if one.max_cores_percent is None else f"{one.max_cores_percent:g}%",
                "-" if one.max_sessions is None else str(one.max_sessions),
                _expiry(one.expires, now),
            )
            for one in known
        ],
    )
    rows = [
        {
            "id": one.id,
            "user": one.user,
            "uid": one.uid,
            "by": "certificate" if one.certificate_sha256 else "token",
            "certificateSha256": one.certificate_sha256 or None,
            "memoryBytes": one.max_memory_bytes,
            "sharePercent": one.max_cores_percent,
            "sessions": one.max_sessions,
            "createdTime": _time(one.created),
            "expiresTime": None if one.expires is None else _time(one.expires),
        }
        for one in known
    ]
    terminal.show(View("RemoteGrants", {"grants": rows}, [one.id for one in known], [table]))
    return 0


def _time(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_seconds))


def _expiry(expires: int | None, now: float) -> str:
    if expires is None:
        return "never"
    return "expired" if expires <= now else _time(expires)


def revoke(arguments: Namespace, terminal: Terminal) -> int:
    """Removes grants; their sessions end within seconds."""
    known, _ = node.of_this_node()
    gone = known.revoke(*_named(arguments.grant, known.all()))
    for one in gone:
        _record(f"remote grant {one.id} of {one.user} revoked")
        terminal.say(f"grant {one.id} of {one.user} is revoked")
    return 0


def _named(named: str, held: Sequence[node.Grant]) -> list[str]:
    """The ids of the grants of a user, or of the grant with an id that begins with `named`. Raises
    VgpuError.
    """
    from vgpud.ctl.allocations import GIVE_MORE, is_short, may_begin_id, whole_id

    try:
        uid = kinds.uid(named)
    except ArgumentTypeError:
        uid = None
    of_user = [one.id for one in held if named == one.user or uid == one.uid]
    by_id = [one.id for one in held if may_begin_id(named) and one.id.startswith(named.lower())]
    if of_user and by_id and not any(named == one.user for one in held):
        sentence = f"{named!r} is the uid of a user with grants, and begins the id of grant {by_id[0]}"
        raise VgpuError(ErrorCode.BAD_REQUEST, sentence, "give the user's name, or the whole id")
    found = of_user or [whole_id(named, by_id, "grants")][: len(by_id)]
    if not found:
        sentence = f"there is no grant {named!r}, and no user of this name has one"
        hint = GIVE_MORE if is_short(named) else "see 'vgpuctl remote grants'"
        raise VgpuError(ErrorCode.NO_SUCH_CLIENT, sentence, hint)
    return found

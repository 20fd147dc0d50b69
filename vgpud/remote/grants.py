"""The grants: which remote users may have slices, each with its quota. One JSON file, which only root reads.

A client proves its grant by a token or by a certificate; the file has the SHA-256 of the token's secret or of
the certificate. A token is ID.SECRET.PIN: the grant's id, 256 random bits, and the SHA-256 of the door's
certificate, by which the client recognizes the door.
"""

import errno
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted, show_bytes

ASK_ANEW = "ask the node's administrator for a new one: vgpuctl remote grant USER"
FILE = "remote/grants.json"  # in the state folder
CERTIFICATE = "remote/certificate.pem"  # the door's certificate, in the folder of the policy
MAX_GRANTS = 10_000
_ID_BYTES, _SECRET_BYTES = 4, 32
#: lengths of a token's three parts: hexadecimal, base64 without padding, hexadecimal SHA-256
TOKEN_CHARACTERS = (2 * _ID_BYTES, 43, 64)


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of a remote user to slices that belong to the local account `uid`. Without `max_memory_bytes`
    or `max_cores_percent`, only the account's [[quota]] limits them. `expires` is a Unix time in seconds.
    """

    id: str
    user: str
    uid: int
    gid: int
    created: int
    secret_sha256: str = ""
    certificate_sha256: str = ""
    expires: int | None = None
    max_memory_bytes: int | None = None
    max_cores_percent: float | None = None
    max_sessions: int | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()


_KINDS = get_type_hints(Grant)
_DIGESTS = ("secret_sha256", "certificate_sha256")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a slice, or those that a caller wants. None means no limit."""

    memory_bytes: int | None
    cores_percent: float | None


def check_quota(grant: Grant, wanted: Sizes, held: Iterable[Sizes], form: str = "") -> None:
    """Raises VgpuError(OVER_QUOTA) if the grant does not allow `wanted` in addition to the slices that it
    `held`. `form` is set if the slice is larger than the request, and names it for the error: a MIG profile
    or a whole device.
    """
    before = list(held)
    if grant.max_sessions is not None and len(before) >= grant.max_sessions:
        what = f"has {counted(len(before), 'session')}, and may have {grant.max_sessions}"
        raise _over(grant, what, _END_ONE)
    memory = sum(one.memory_bytes or 0 for one in (*before, wanted))
    cores = sum(100.0 if one.cores_percent is None else one.cores_percent for one in (*before, wanted))
    most_memory, most_cores = grant.max_memory_bytes, grant.max_cores_percent
    with_form = form and f" with {form}"
    if most_memory is not None and (wanted.memory_bytes is None or memory > most_memory):
        would = "asks for no --memory" if wanted.memory_bytes is None else f"would hold {show_bytes(memory)}"
        raise _over(grant, f"{would}{with_form}, and may hold {show_bytes(most_memory)}", _ask_less(grant))
    if most_cores is not None and cores > most_cores:
        what = f"would hold {cores:g}% of a device{with_form}, and may hold {most_cores:g}%"
        raise _over(grant, what, _ask_less(grant))


_END_ONE = "end a session ('vgpuctl remote status')"


def _over(grant: Grant, what: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.OVER_QUOTA, f"grant {grant.id} of {grant.user} {what}", hint)


def _ask_less(grant: Grant) -> str:
    """Returns a hint that also says how a request without a size counts."""
    memory, cores = grant.max_memory_bytes, grant.max_cores_percent
    counts = [] if memory is None else [f"--memory counts as {show_bytes(memory)}"]
    counts += [] if cores is None else [f"--cores counts as {min(cores, 100.0):g}"]
    return f"ask for less (left out, {' and '.join(counts)}), or {_END_ONE}"


def of_this_node() -> "tuple[Grants, Path]":
    """Returns the grants of this node, and the path of its door's certificate. Reads the environment itself,
    because a session process does not import vgpud.settings for callers without a grant (entry.py).
    """
    state = Path(os.environ.get("VGPUD_STATE_DIR") or "/var/lib/vgpud")
    config = Path(os.environ.get("VGPUD_CONFIG") or "/etc/vgpud/vgpud.toml")
    return Grants(state / FILE), config.parent / CERTIFICATE


def group_of_tenants() -> int | None:
    """Returns the gid of the group that may open vgpud.sock; None if the host does not have the group."""
    import grp

    from vgpud.settings import load_settings

    try:
        return grp.getgrnam(load_settings().group).gr_gid
    except KeyError:
        return None


def _rows(text: str) -> list[dict[str, Any]]:
    """Parses the file's text into one object for each grant. Raises ValueError, RecursionError, TypeError."""
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise TypeError("it is not a list")
    return rows


def _read(row: dict[str, Any]) -> Grant:
    """Reads one grant of the file. Raises TypeError."""
    grant = Grant(**row)
    for name, kind in _KINDS.items():
        value = getattr(grant, name)
        if not isinstance(value, kind) and not (isinstance(value, int) and name == "max_cores_percent"):
            raise TypeError(f"{name} of a grant is {value!r}")
        if name in _DIGESTS and not re.fullmatch("([0-9a-f]{64})?", value):
            raise TypeError(f"{name} of a grant is not 64 hexadecimal digits")
    return grant


class Grants:
    """The file of grants. Each method raises VgpuError if the file cannot be used: NOT_ALLOWED if the caller
    has no permission, otherwise LEDGER_FAILED.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> tuple[Grant, ...]:
        """Returns all grants in the order in which they were made, including expired ones."""
        try:
            return tuple(_read(one) for one in _rows(self._path.read_text()))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise self._failed(error) from None

    def get(self, grant_id: str) -> Grant | None:
        """Returns the grant; None if there is none, for example after a revocation."""
        return next((one for one in self.all() if one.id == grant_id), None)

    def find(self, token: str, certificate: str) -> Grant:
        """Returns the live grant of the token or, without a token, of the certificate. Raises VgpuError:
        NOT_ALLOWED if there is none, and LEDGER_FAILED for any failure to read the file.
        """
        try:
            known = self.all()
        except VgpuError as error:
            raise VgpuError(ErrorCode.LEDGER_FAILED, error.sentence, error.hint) from None
        grant_id, _, rest = token.partition(".")
        digest = hashlib.sha256(rest.partition(".")[0].encode()).hexdigest()
        for one in known:
            by_token = (
                one.secret_sha256 and hmac.compare_digest(one.secret_sha256, digest) and one.id == grant_id
            )
            by_certificate = not token and certificate and one.certificate_sha256 == certificate
            if (by_token or by_certificate) and not one.expired:
                return one
        raise VgpuError(
            ErrorCode.NOT_ALLOWED,
            "no grant has this token or certificate, or the grant was revoked or has expired",
            ASK_ANEW,
        )

    def add(self, grant: Grant, pin: str) -> tuple[Grant, str]:
        """Adds a grant under a new id. Returns it with its token; the token of a grant for a certificate is
        "". Raises VgpuError: BAD_REQUEST if a live grant has the certificate, DENIED_BY_POLICY if there are
        MAX_GRANTS grants.
        """
        with self._locked():
            known = self.all()
            shown = grant.certificate_sha256
            same = next(
                (one for one in known if shown == one.certificate_sha256 != "" and not one.expired), None
            )
            if same is not None:
                sentence = f"grant {same.id} of {same.user} has this certificate"
                hint = f"revoke it first ('vgpuctl remote revoke {same.id}'), or name another certificate"
                raise VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
            if len(known) >= MAX_GRANTS:
                sentence = f"there are {len(known)} grants, and {MAX_GRANTS} is the limit"
                raise VgpuError(ErrorCode.DENIED_BY_POLICY, sentence, "revoke those that are not needed")
            taken = {one.id for one in known}
            grant_id = next(one for one in iter(lambda: secrets.token_hex(_ID_BYTES), "") if one not in taken)
            grant, token = replace(grant, id=grant_id), ""
            if not grant.certificate_sha256:
                secret = secrets.token_urlsafe(_SECRET_BYTES)
                token = f"{grant_id}.{secret}.{pin}"
                grant = replace(grant, secret_sha256=hashlib.sha256(secret.encode()).hexdigest())
            self._write((*known, grant))
        return grant, token

    def revoke(self, *ids: str) -> tuple[Grant, ...]:
        """Removes the grants with these ids. Returns them."""
        with self._locked():
            known = self.all()
            gone = tuple(one for one in known if one.id in ids)
            if gone:
                self._write(one for one in known if one not in gone)
        return gone

    @contextmanager
    def _open(self, suffix: str) -> Iterator[int]:
        """Opens a file beside that of the grants, to lock it. Its end ends the lock."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path.with_suffix(suffix), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from None
        try:
            yield lock
        finally:
            os.close(lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._open(".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def counting(self, grant_id: str) -> Iterator[None]:
        """Holds a lock from the check of a grant's quota until the allocation, against the other session
        processes of the grant. Grants can be added and revoked meanwhile, and sessions of other grants begin,
        because vgpud may take long to answer.
        """
        with self._open(".counting") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(grant_id, 16))  # one byte of the file for each grant
            yield

    def _write(self, grants: Iterable[Grant]) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump([asdict(one) for one in grants], file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> VgpuError:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sentence = f"the grants in {self._path} cannot be used: {said.lower()}"
        if isinstance(error, PermissionError):
            from vgpud.remote.certificates import AS_ROOT

            return VgpuError(ErrorCode.NOT_ALLOWED, sentence, AS_ROOT)
        # to remove the file would end all sessions
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free space there; the grants are as they were" if full else "correct or remove the file"
        return VgpuError(ErrorCode.LEDGER_FAILED, sentence, hint)

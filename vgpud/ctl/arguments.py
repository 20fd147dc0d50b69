"""Parsers of command-line arguments. They import other modules of vgpud only when they are called."""

import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vgpud.model.quantity import Percent

MAX_COUNT = 64  # vgpud takes no more slices in a request
MAX_SESSIONS = 1024
MAX_TIMEOUT_SECONDS = 3600.0
MIN_DELAY_SECONDS = 0.1
MAX_EVENTS = 1_000


class Argument(NamedTuple):
    """The arguments of one call of argparse's add_argument."""

    flags: tuple[str, ...]
    options: dict[str, Any]


def argument(*flags: str, **options: Any) -> Argument:  # noqa: ANN401 - argparse's own
    return Argument(flags, options)


def memory(text: str) -> int:
    """Parses an amount of memory into bytes. Raises VgpuError(BAD_QUANTITY)."""
    from vgpud.model.quantity import parse_bytes

    return parse_bytes(text)


def cores(text: str) -> "Percent":
    """Parses a share of a device's compute. Raises VgpuError(BAD_PERCENT)."""
    from vgpud.model.quantity import Percent

    return Percent.parse(text)


def count(text: str) -> int:
    return _number_of("devices", text, MAX_COUNT)


def sessions(text: str) -> int:
    return _number_of("sessions", text, MAX_SESSIONS)


def _number_of(what: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise ArgumentTypeError(f"{text!r} is not a number of {what} from 1 to {most}")
    return int(text)


def isolation(text: str) -> str:
    """Parses an isolation. The name of a mode stands for the isolation of that mode."""
    modes = {"mig": "hardware", "mps": "compute", "preload": "quota", "exclusive": "device"}
    return modes.get(text, text)


def pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)


def timeout(text: str) -> float:
    """Parses a timeout: seconds above 0, up to an hour. Infinity and NaN are refused."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds up to {MAX_TIMEOUT_SECONDS:g}")
    return seconds


def delay(text: str) -> float:
    """Parses the delay between two samples, in seconds."""
    seconds = timeout(text)
    if seconds < MIN_DELAY_SECONDS:
        raise ArgumentTypeError(f"{text!r} is less than {MIN_DELAY_SECONDS:g} seconds")
    return seconds


def last(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_EVENTS:
        raise ArgumentTypeError(f"{text!r} is not a number of events from 1 to {MAX_EVENTS}")
    return int(text)


def since(text: str) -> float:
    """Parses a span of time into seconds: a number with s, min, h or d."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(s|min|h|d)", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a span, as in 90s, 10min, 2h or 1d")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[found[2]]


def lifetime(text: str) -> float:
    """Parses a span of at least a second into seconds: what ends sooner has ended before its first use."""
    seconds = since(text)
    if seconds < 1:
        raise ArgumentTypeError(f"{text!r} is less than a second")
    return seconds


def uid(text: str) -> int:
    """Parses a uid: a number or a login name."""
    if text.isascii() and text.isdigit() and int(text) < 2**32 - 1:
        return int(text)
    import pwd

    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise ArgumentTypeError(f"this host has no user {text!r}") from None


def revision(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**64:
        raise ArgumentTypeError(f"{text!r} is not a revision")
    return int(text)


def owner(text: str) -> tuple[int, int]:
    """Parses "UID:GID" into two numbers. Names are refused, because a name may have another number on the
    daemon's host.
    """
    uid, separator, gid = text.partition(":")
    digits = all(part.isascii() and part.isdigit() and int(part) < 2**32 - 1 for part in (uid, gid))
    if not separator or not digits:
        raise ArgumentTypeError(f"{text!r} is not UID:GID in numbers: 'id USER' prints them")
    return int(uid), int(gid)

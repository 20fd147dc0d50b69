"""Reads one policy file: its values, and the line of each key."""

import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgpud.model.quantity import format_bytes
from vgpud.policy.locate import MAX_DEPTH, KeyPath, TooDeepError, locate, repeated, spell
from vgpud.policy.origin import Origin, Problem

# maximum size of a policy file: far more than MAX_RULES rules need; a longer file could keep a parser busy
MAX_FILE_BYTES = 256 * 1024

# What tomllib says of a key or a table that stands twice.
_TWICE = ("Cannot overwrite a value", "Cannot declare ")

_POSITION = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is well-formed TOML; `lines` has the keys of policy/locate.py."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def has(self, path: KeyPath) -> bool:
        return path in self.lines

    def origin(self, path: KeyPath) -> Origin:
        """The origin of `path`, or of the nearest table that should contain it."""
        while path and path not in self.lines:
            path = path[:-1]
        return Origin(self.path, self.lines.get(path, 1))


def read(path: Path) -> Source | Problem:
    """Reads the file at `path`. Returns a Problem if it cannot be read or is not TOML."""
    try:
        raw = _read_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        reason = getattr(error, "strerror", None) or str(error)
        return Problem(Origin(path), "", f"cannot be read: {reason.lower()}", "check the path and its mode")
    if isinstance(raw, Problem):
        return raw
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        sentence = f"byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8"
        return Problem(Origin(path, line), "", sentence, "TOML files are in UTF-8")
    return parse(path, text)


def parse(path: Path, text: str) -> Source | Problem:
    """Parses `text` as the content of `path`. Returns a Problem if the text is not TOML."""
    lines: Mapping[KeyPath, int] = {}
    try:
        lines = locate(text)
    except TooDeepError as error:
        sentence = f"is nested more than {MAX_DEPTH} levels deep"
        return Problem(Origin(path, error.line), "", sentence, "a policy has four levels")
    except ValueError:
        pass  # the text is not TOML: tomllib, which is called next, reports this with a better message
    try:
        return Source(path, tomllib.loads(text), lines)
    except tomllib.TOMLDecodeError as error:
        return _malformed(path, text, str(error))
    except ValueError:  # int() refuses a number with too many digits
        digits = sys.get_int_max_str_digits()
        sentence = f"is not TOML: a number has more than {digits} digits"
        return Problem(Origin(path), "", sentence, "a policy needs no number beyond 64 bits: correct it")


def _read_bytes(path: Path) -> bytes | Problem:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        # O_NONBLOCK and the check for a regular file: opening a FIFO would wait for a writer
        return Problem(Origin(path), "", "is not a regular file", "put a regular file there, or remove it")
    # O_NONBLOCK, because a read of a file of the kernel such as /proc/kmsg can wait for data
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if raw is None:
        return Problem(Origin(path), "", "is not a regular file", "put a regular file there, or remove it")
    if len(raw) > MAX_FILE_BYTES:
        sentence = f"is larger than {format_bytes(MAX_FILE_BYTES)}"
        return Problem(Origin(path), "", sentence, "a policy is short: is this the right file")
    return raw


def _malformed(path: Path, text: str, message: str) -> Problem:
    found = _POSITION.search(message)
    line, where = None, ""
    if found:
        at_end = found["line"] is None
        line = text.rstrip().count("\n") + 1 if at_end else int(found["line"])
        where = " at the end of the file" if at_end else f" at column {found['column']}"
        message = message[: found.start()]
    if line is not None and message.startswith(_TWICE) and (again := repeated(text, line)):
        key, first = again
        return Problem(
            Origin(path, line), spell(key), f"stands twice: first on line {first}", "keep one of the two"
        )
    reason = "".join(c if c.isprintable() else " " for c in message)
    sentence = f"is not TOML: {reason[:1].lower()}{reason[1:200]}{where}"
    hint = "correct it at that place" if where else "correct the file; toml.io has the format"
    if text.startswith("\ufeff"):
        hint = "save the file without a byte order mark"
    elif reason.startswith("Invalid value"):
        hint = 'text stands in quotes, as in mode = "auto"'
    return Problem(Origin(path, line), "", sentence, hint)

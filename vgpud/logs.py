"""Configures logging: fields to the journal; otherwise JSON lines on stderr, or readable text on a terminal.

Field names in the journal are upper case with the prefix VGPUD_ (systemd silently drops others:
systemd/python-systemd issue 69). Repeated lines of one user or one event are rate-limited, and the next line
contains the number of dropped lines. This limit drops no audit line of a change that was made.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog

from vgpud import sd
from vgpud.model.journal import Message

LINES, SECONDS = 60, 10.0  # maximum of lines of one event for one user (LINES) within a time window (SECONDS)
_FORGET_AT = 4096
AUDIT = Message.AUDIT

_UNTOLD = ("event", "level", "message_id", "exception")
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure(level: int) -> None:
    """Configures logging for the whole process. Call it once, before the first log line."""
    shared: list[Any] = [
        Thinned(time.monotonic),
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if sd.stderr_is_journal():
        tail: list[Any] = [_to_journal]
    elif sys.stderr.isatty():
        tail = [structlog.processors.TimeStamper(fmt="%H:%M:%S"), _escaped, structlog.dev.ConsoleRenderer()]
    else:
        tail = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(default=str),
        ]
    structlog.configure(
        processors=shared + tail,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # grpc logs a traceback for each caller that disconnects during a reply. Errors of vgpud itself are logged
    # by its servers.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)


class Thinned:
    """A rate limit. It drops lines of one kind beyond LINES in SECONDS for one user, and beyond ten times
    that for all users together. Each event is a kind; in the audit trail, each requested change is a kind.

    A tenant whose requests are refused in a loop must not flood the journal. Many refusals of one change (for
    example connections to a closed runtime.sock) must not push out lines about other changes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: dict[tuple[object, ...], tuple[float, int]] = {}
        self._left_out: dict[tuple[object, ...], int] = {}

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if "audit" in event and event.get("outcome") == "done":
            return event
        kind = event.get("event"), event.get("audit")
        keys = ((*kind, event.get("uid")), kind)
        for key, most in zip(keys, (LINES, 10 * LINES), strict=True):
            # a line that the user's own limit drops does not count towards the limit of all
            if self._count(key) > most:
                self._left_out[key] = self._left_out.get(key, 0) + 1
                raise structlog.DropEvent
        left_out = sum(self._left_out.pop(key, 0) for key in keys)
        if left_out:
            event["left_out"] = left_out
        return event

    def _count(self, key: tuple[object, ...]) -> int:
        now = self._clock()
        began, count = self._windows.get(key, (now, 0))
        if now - began >= SECONDS:
            began, count = now, 0
        # If there are too many windows, the windows of single users are forgotten. The windows that count all
        # users together are kept.
        if len(self._windows) >= _FORGET_AT:
            self._windows = {k: v for k, v in self._windows.items() if len(k) == 2}
            self._left_out = {k: v for k, v in self._left_out.items() if len(k) == 2}
        self._windows[key] = (began, count + 1)
        return count + 1


def _escaped(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes control characters: a caller's text may contain them, and a terminal would obey them."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            kept = "\n" if key == "exception" else ""
            event[key] = "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in value)
    return event


def _to_journal(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """Sends the fields to the journal and drops the line itself."""
    sd.journal_send(journal_message(event), journal_fields(event))
    raise structlog.DropEvent


def journal_message(event: Mapping[str, Any]) -> str:
    """The message that `journalctl` shows by default, in the style of logfmt: `refused: uid=7 why="the card
    is full"`.
    """
    told = [f"{key}={_quoted(_text(value))}" for key, value in event.items() if key not in _UNTOLD]
    line = f"{event.get('event', '')}{': ' if told else ''}{' '.join(told)}"
    return f"{line}\n{event['exception']}" if "exception" in event else line


def _text(value: object) -> str:
    """A field's value in words: the entries of a list or a table with commas between them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _quoted(text: str) -> str:
    if text and text.isprintable() and not set(text) & set(' "='):
        return text
    # escapes the control characters that move the cursor, too
    return json.dumps(text, ensure_ascii=not text.isprintable())


def journal_fields(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The journal's fields for a log line. A line of the audit trail has two MESSAGE_IDs: that of its event,
    by which `journalctl -x` explains it, and AUDIT.
    """
    level = str(event.get("level", "info"))
    fields = [("PRIORITY", str(_PRIORITIES.get(level, 6))), ("SYSLOG_IDENTIFIER", "vgpud")]
    messages = [event["message_id"]] if "message_id" in event else []
    if "audit" in event and AUDIT not in messages:
        messages.append(AUDIT)
    fields += [("MESSAGE_ID", str(message)) for message in messages]
    for key, value in event.items():
        if key not in ("event", "level", "message_id"):
            name = "VGPUD_" + "".join(c if c.isalnum() else "_" for c in key.upper())
            fields.append((name, _text(value)))
    return fields

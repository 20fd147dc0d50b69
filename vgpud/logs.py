"""Logs: JSON lines on stderr, or a console rendering on a terminal; the journal takes fields.

Field names in the journal are upper case with the prefix VGPUD_ (systemd drops others without a
word: systemd/python-systemd issue 69). What one user or one cause repeats is thinned out, and the
next line says how many were left out; what was changed always stands in the audit trail.
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

LINES, SECONDS = 60, 10.0  # of one kind, by one user
_FORGET_AT = 4096
AUDIT = Message.AUDIT

_UNTOLD = ("event", "level", "message_id", "exception")
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure(level: int) -> None:
    """For the whole process; call once, before the first line is logged."""
    shared: list[Any] = [
        Thinned(time.monotonic),
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if sd.stderr_is_journal():
        tail: list[Any] = [_to_journal]
    elif sys.stderr.isatty():
        tail = [structlog.processors.TimeStamper(fmt="%H:%M:%S"), structlog.dev.ConsoleRenderer()]
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
    # grpc writes a traceback for each caller that goes away in the middle of a reply; what fails in vgpud
    # itself is caught and logged by the doors
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)


class Thinned:
    """Drops lines beyond LINES in SECONDS of one event by one user, and ten times that of all users.

    A tenant that asks in a loop and is refused must fill neither the disk nor the view.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: dict[tuple[object, ...], tuple[float, int]] = {}
        self._left_out: dict[tuple[object, ...], int] = {}

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if event.get("message_id") == AUDIT and event.get("outcome") == "done":
            return event
        kind = event.get("event")
        keys = ((kind, event.get("uid")), (kind,))
        for key, most in zip(keys, (LINES, 10 * LINES), strict=True):
            if self._count(key) > most:  # what one user may not write does not count for all
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
        if len(self._windows) >= _FORGET_AT:  # of so many users each begins anew, all together do not
            self._windows = {k: v for k, v in self._windows.items() if len(k) == 1}
            self._left_out = {k: v for k, v in self._left_out.items() if len(k) == 1}
        self._windows[key] = (began, count + 1)
        return count + 1


def _to_journal(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """Sends the fields to the journal and drops the line itself."""
    fields = journal_fields(event)
    sd.journal_send(journal_message(event), fields)
    raise structlog.DropEvent


def journal_message(event: Mapping[str, Any]) -> str:
    """What `journalctl` shows unasked, in the style of logfmt: `refused: uid=7 why="the card is full"`."""
    told = [f"{key}={_quoted(value)}" for key, value in event.items() if key not in _UNTOLD]
    line = f"{event.get('event', '')}{': ' if told else ''}{' '.join(told)}"
    return f"{line}\n{event['exception']}" if "exception" in event else line


def _quoted(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not set(text) & set(' "='):
        return text
    # what moves a cursor is escaped too
    return json.dumps(text, ensure_ascii=not text.isprintable())


def journal_fields(event: Mapping[str, Any]) -> dict[str, str]:
    """The journal's names for an event's keys."""
    level = str(event.get("level", "info"))
    fields = {"PRIORITY": str(_PRIORITIES.get(level, 6)), "SYSLOG_IDENTIFIER": "vgpud"}
    if "message_id" in event:
        fields["MESSAGE_ID"] = str(event["message_id"])
    for key, value in event.items():
        if key not in ("event", "level", "message_id"):
            fields["VGPUD_" + "".join(c if c.isalnum() else "_" for c in key.upper())] = str(value)
    return fields

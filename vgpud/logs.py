"""Logs: JSON lines on stderr, or a console rendering on a terminal; the journal takes fields.

Field names in the journal are upper case with the prefix VGPUD_ (systemd drops others without a
word: systemd/python-systemd issue 69).
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from vgpud import sd

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure(level: int) -> None:
    """For the whole process; call once, before the first line is logged."""
    shared: list[Any] = [structlog.processors.add_log_level, structlog.processors.format_exc_info]
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
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)


def _to_journal(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """Sends the fields to the journal and drops the line itself."""
    fields = journal_fields(event)
    sd.journal_send(str(event.get("event", "")), fields)
    raise structlog.DropEvent


def journal_fields(event: Mapping[str, Any]) -> dict[str, str]:
    """The journal's names for an event's keys."""
    level = str(event.get("level", "info"))
    fields = {"PRIORITY": str(_PRIORITIES.get(level, 6)), "SYSLOG_IDENTIFIER": "vgpud"}
    for key, value in event.items():
        if key not in ("event", "level"):
            fields["VGPUD_" + "".join(c if c.isalnum() else "_" for c in key.upper())] = str(value)
    return fields

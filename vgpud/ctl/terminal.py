"""Writes data to standard output and messages to standard error."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from vgpud.ctl.table import Table, render

API_VERSION = "vgpud.io/v1"
STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "selected": "7"}


class View(NamedTuple):
    """One answer in every output form: `tables` for people, `names` one per line, `document` for scripts."""

    kind: str
    document: Mapping[str, Any]
    names: Sequence[str]
    tables: Sequence[Table]


def machine(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with the two fields that all documents begin with: API version and kind."""
    return {"apiVersion": API_VERSION, "kind": kind, **document}


def wants_color(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Decides on colour by the option, then FORCE_COLOR, then NO_COLOR (no-color.org, force-color.org), then
    the stream.
    """
    if choice != "auto":
        return choice == "always"
    if environment.get("FORCE_COLOR"):
        return True
    if environment.get("NO_COLOR"):
        return False
    return stream.isatty() and environment.get("TERM") != "dumb"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """While the body runs, SIGTERM and SIGHUP raise SystemExit, so that the body's changes of the terminal
    are undone. A signal that is ignored (nohup) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # None: a handler that Python does not know and cannot install again
    ends = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in ends:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in ends.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # the exit code that shells use for a signal


class Terminal(NamedTuple):
    """The output settings from the command line."""

    output: str = "table"
    quiet: bool = False
    verbose: bool = False
    headers: bool = True
    color: str = "auto"
    streams: bool = False  # the verb prints one JSON document per line

    @classmethod
    def of(cls, arguments: Namespace, streams: bool = False) -> "Terminal":
        return cls(
            arguments.output,
            arguments.quiet,
            arguments.verbose,
            not arguments.no_headers,
            arguments.color,
            streams,
        )

    @property
    def is_machine(self) -> bool:
        return self.output in ("json", "yaml")

    @property
    def is_text(self) -> bool:
        """Is the answer for people: neither a document nor bare names?"""
        return not self.is_machine and self.output != "name"

    def paint(self, text: str, style: str, stream: TextIO | None = None) -> str:
        if not style or not wants_color(self.color, stream or sys.stdout, os.environ):
            return text
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m"

    def say(self, text: str) -> None:
        """Prints a message for people; --quiet silences it."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def show(self, view: View) -> None:
        """Prints an answer in the requested form."""
        if self.is_machine:
            self.write_document(machine(view.kind, view.document))
        elif self.output == "name":
            for name in view.names:
                print(name)
        else:
            blocks = [render(table, self.output == "wide", self.headers, self.paint) for table in view.tables]
            text = "\n\n".join("\n".join(lines) for lines in blocks if lines)
            if text:
                print(text, flush=True)

    def write_document(self, document: Mapping[str, Any]) -> None:
        if self.output == "yaml":
            import yaml

            print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="", flush=True)
        else:
            import json

            print(json.dumps(document, indent=None if self.streams else 2), flush=True)

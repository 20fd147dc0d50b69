"""Parses a command line by the table of verbs. Global options may stand before or after the verb."""

import argparse
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from vgpud.ctl import arguments as kinds
from vgpud.ctl.arguments import Argument, argument
from vgpud.ctl.verbs import ANY_OUTPUT, VERBS, Group, Verb

DEFAULT_TIMEOUT_SECONDS = 30.0

EVERYWHERE: tuple[Argument, ...] = (
    argument("-o", "--output", metavar="FORMAT", help=f"{', '.join(ANY_OUTPUT)}; alloc also has env"),
    argument(
        "--socket",
        metavar="PATH",
        help="the daemon's socket (default: the most privileged that you may open)",
    ),
    argument(
        "--timeout",
        type=kinds.timeout,
        metavar="SECONDS",
        help=f"time limit of each call (default {DEFAULT_TIMEOUT_SECONDS:g})",
    ),
    argument("-q", "--quiet", action="store_true", help="errors only on standard error"),
    argument("-v", "--verbose", action="store_true", help="more words, and the details of errors"),
    argument("--no-headers", action="store_true", help="tables without the line of headers"),
    argument(
        "--color", choices=("auto", "always", "never"), help="default auto; heeds NO_COLOR, FORCE_COLOR"
    ),
)
DEFAULTS: dict[str, object] = {
    "output": None,
    "socket": None,
    "timeout": DEFAULT_TIMEOUT_SECONDS,
    "quiet": False,
    "verbose": False,
    "no_headers": False,
    "color": "auto",
}

# Verbs of other tools, and the verb of vgpuctl for each.
SYNONYMS: dict[str, str] = {
    "create": "alloc",
    "allocate": "alloc",
    "new": "alloc",
    "delete": "release",
    "del": "release",
    "free": "release",
    "remove": "release",
    "rm": "release",
    "stop": "release",
    "exec": "run",
    "describe": "show",
    "get": "show",
    "info": "show",
    "inspect": "show",
    "list": "ls",
    "allocations": "ls",
    "gpu": "devices",
    "gpus": "devices",
    "nodes": "devices",
    "dev": "devices",
    "log": "events",
    "logs": "events",
    "history": "events",
    "check": "doctor",
    "diagnose": "doctor",
    "cordon": "drain",
    "uncordon": "undrain",
    "migrate": "move",
    "mv": "move",
    "checkpoint": "suspend",
    "restore": "resume",
    "processes": "ps",
    "quota": "policy show",
    "reload": "policy reload",
    "config": "policy show",
}

_Entry = TypeVar("_Entry", Verb, Verb | Group)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises VgpuError. An unknown option is reported before a missing argument."""

    _line: Sequence[str] = ()

    def read(self, line: Sequence[str], namespace: argparse.Namespace) -> None:
        """Parses `line` into `namespace`. Raises VgpuError(BAD_REQUEST)."""
        self._line = line
        self.parse_args(line, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = self._unknown_option()
        if unknown and ("unrecognized" in message or "required" in message):
            long = unknown if unknown.startswith("--") else f"-{unknown}"
            near = _nearest(long, self._option_string_actions)
            hint = f"did you mean {near}" if near else f"see '{self.prog} --help'"
            raise bad_usage(f"{self.prog} has no option {unknown}", hint)
        raise bad_usage(message, f"see '{self.prog} --help'")

    def _unknown_option(self) -> str:
        options = (word.partition("=")[0] for word in self._line if re.match("--[a-z]|-[a-z]$", word))
        return next((word for word in options if word not in self._option_string_actions), "")


def bad_usage(sentence: str, hint: str) -> Exception:
    """Makes a VgpuError(BAD_REQUEST). The import is inside the function, for a fast --help."""
    from vgpud.model.errors import ErrorCode, VgpuError

    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)


def parse(argv: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """Parses a whole command line into the verb and its arguments, which always include the global options
    (EVERYWHERE).

    Raises VgpuError, or SystemExit(0) once help or the version has been printed.
    """
    namespace = argparse.Namespace(**DEFAULTS)
    head, tail = _split(argv)
    entry, prog, rest = _choose("vgpuctl", VERBS, head, namespace)
    if isinstance(entry, Group):
        verb, prog, rest = _choose(prog, entry.verbs, rest, namespace)
    else:
        verb = entry
    _verb_parser(verb, prog).read(rest if verb.takes_command else [*rest, *tail], namespace)
    if verb.takes_command:
        # If words before "--" already belong to the command that vgpuctl runs, the "--" is one of its
        # arguments.
        namespace.command = namespace.command + tail if namespace.command else tail[1:]
    if namespace.output is None:
        namespace.output = verb.default_output
    if namespace.output not in verb.outputs:
        choice = f"use one of {', '.join(verb.outputs)}" if len(verb.outputs) > 1 else "leave -o out"
        raise bad_usage(f"{prog} has no output format {namespace.output!r}", choice)
    return verb, namespace


def output_options(argv: Sequence[str]) -> argparse.Namespace:
    """The global options of a command line that `parse` refuses, as far as they say how to print the refusal:
    -o, -q and -v. With a verb that runs a command, -o may be the command's and is left out.
    """
    namespace = argparse.Namespace(**DEFAULTS)
    parser = Parser(add_help=False, allow_abbrev=False)
    for flags, options in EVERYWHERE:
        if flags[0] in ("-o", "-q", "-v"):
            parser.add_argument(*flags, **options)
    head, _ = _split(argv)
    with suppress(Exception):  # -o has no value
        parser.parse_known_args(head, namespace)
    namespace.output = "table" if "run" in head or namespace.output is None else namespace.output
    return namespace


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments at the first "--", which stays with the second part: argparse would remove it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at:]


def _choose(
    prog: str, entries: tuple[_Entry, ...], argv: Sequence[str], namespace: argparse.Namespace
) -> tuple[_Entry, str, list[str]]:
    """Parses the options before the verb. Returns the verb (or group), the program's name with the verb's
    name appended, and the words after the verb, unparsed. `help VERB` is `VERB --help`, and `version` is
    `--version`.
    """
    parser = _chooser(prog, entries)
    parser.read(argv or ["--help"], namespace)
    word: str = namespace.verb
    rest: list[str] = namespace.rest
    if prog == "vgpuctl" and word == "help":
        return _choose(prog, entries, [*rest, "--help"], namespace)
    if prog == "vgpuctl" and word == "version":
        parser.read(["--version"], namespace)
    found = next((entry for entry in entries if entry.name == word), None)
    if found is None:
        raise _unknown_verb(prog, word, [entry.name for entry in entries])
    return found, f"{prog} {word}", rest


def _chooser(prog: str, entries: Iterable[Verb | Group]) -> Parser:
    lines = "\n".join(f"  {entry.name:<12}{entry.help}" for entry in entries)
    parser = Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS] VERB ...",
        description="verbs:\n" + lines,
        epilog=f"'{prog} VERB --help' says more. Exit codes are in vgpuctl's manual.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_everywhere(parser)
    if prog == "vgpuctl":
        from vgpud import __version__

        parser.add_argument("-V", "--version", action="version", version=f"vgpuctl {__version__}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


def _verb_parser(verb: Verb, prog: str) -> Parser:
    positionals = [a.options for a in verb.arguments if not a.flags[0].startswith("-")]
    parser = Parser(
        prog=prog,
        usage=" ".join((prog, "[OPTIONS]", *map(_in_usage, positionals))),
        description=textwrap.fill(f"{verb.help[0].upper()}{verb.help[1:]}. {verb.details}".strip(), 78),
        epilog="\n".join(("examples:", *(f"  $ {line}" for line in verb.examples)))
        if verb.examples
        else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flags, options in verb.arguments:
        parser.add_argument(*flags, **options)
    _add_everywhere(parser)
    return parser


def _in_usage(options: Mapping[str, Any]) -> str:
    return f"{options['metavar']}{'...' if options.get('nargs') in ('+', '*') else ''}"


def _add_everywhere(parser: Parser) -> None:
    """Adds the global options with SUPPRESS as the default, so that the verb's parser keeps values given
    before the verb.
    """
    group = parser.add_argument_group("options of every verb, before or after it")
    for flags, options in EVERYWHERE:
        group.add_argument(*flags, default=argparse.SUPPRESS, **options)


def _nearest(word: str, known: Iterable[str]) -> str:
    """The word in `known` that is most similar to `word`; empty if none is similar."""
    from difflib import get_close_matches

    words = list(known)
    begins = [one for one in words if one.startswith(word)]
    near = begins if len(begins) == 1 else get_close_matches(word, words, n=1, cutoff=0.6)
    return near[0] if near else ""


def _unknown_verb(prog: str, word: str, names: list[str]) -> Exception:
    meant = SYNONYMS.get(word, "") if prog == "vgpuctl" else ""
    near = meant or _nearest(word, names)
    more = ["help", "version"] if prog == "vgpuctl" else []
    hint = f"did you mean '{prog} {near}'" if near else f"one of {', '.join([*names, *more])}"
    return bad_usage(f"unknown verb {word!r}", hint)

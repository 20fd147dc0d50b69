"""Reads a command line by the table of verbs. Options of every verb may stand before or after it."""

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeVar

from vgpud.ctl import arguments as kinds
from vgpud.ctl.arguments import Argument, argument
from vgpud.ctl.verbs import ANY_OUTPUT, VERBS, Group, Verb

DEFAULT_TIMEOUT_SECONDS = 30.0

EVERYWHERE: tuple[Argument, ...] = (
    argument("-o", "--output", metavar="FORMAT", help=f"{', '.join(ANY_OUTPUT)}; alloc also has env"),
    argument("--socket", metavar="PATH", help="the daemon's socket; found by rights when left out"),
    argument(
        "--timeout",
        type=kinds.timeout,
        metavar="SECONDS",
        help=f"for each call (default {DEFAULT_TIMEOUT_SECONDS:g})",
    ),
    argument("-q", "--quiet", action="store_true", help="errors only on standard error"),
    argument("-v", "--verbose", action="store_true", help="more words, and the details of errors"),
    argument("--no-headers", action="store_true", help="tables without their first line"),
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

_Entry = TypeVar("_Entry", Verb, Verb | Group)


class Parser(argparse.ArgumentParser):
    """argparse, saying what is wrong in the house's way."""

    def error(self, message: str) -> NoReturn:
        raise bad_usage(message, f"see '{self.prog} --help'")


def bad_usage(sentence: str, hint: str) -> Exception:
    """A VgpuError(BAD_REQUEST); its module is imported only now, for the sake of --help."""
    from vgpud.model.errors import ErrorCode, VgpuError

    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)


def parse(argv: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """The verb and its arguments, those of EVERYWHERE always among them.

    Raises VgpuError, or SystemExit(0) once help or the version has been printed.
    """
    namespace = argparse.Namespace(**DEFAULTS)
    head, tail = _split(argv)
    entry, prog, rest = _choose("vgpuctl", VERBS, head, namespace)
    if isinstance(entry, Group):
        verb, prog, rest = _choose(prog, entry.verbs, rest, namespace)
    else:
        verb = entry
    _verb_parser(verb, prog).parse_args(rest if verb.takes_command else [*rest, *tail], namespace)
    if verb.takes_command:
        # words before "--" can be a command too, and then the "--" is one of its own
        namespace.command = namespace.command + tail if namespace.command else tail[1:]
    if namespace.output is None:
        namespace.output = verb.default_output
    if namespace.output not in verb.outputs:
        raise bad_usage(
            f"{prog} has no output format {namespace.output!r}", f"use one of {', '.join(verb.outputs)}"
        )
    return verb, namespace


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first "--", and the rest with it: argparse would lose track of it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at:]


def _choose(
    prog: str, entries: tuple[_Entry, ...], argv: Sequence[str], namespace: argparse.Namespace
) -> tuple[_Entry, str, list[str]]:
    """Reads up to the verb; the words after it come back untouched."""
    parser = _chooser(prog, entries)
    if not argv:
        raise bad_usage("no verb given", f"one of {', '.join(entry.name for entry in entries)}")
    parser.parse_args(argv, namespace)
    word, rest = namespace.verb, namespace.rest
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

        parser.add_argument("--version", action="version", version=f"vgpuctl {__version__}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


def _verb_parser(verb: Verb, prog: str) -> Parser:
    positionals = (a.options["metavar"] for a in verb.arguments if not a.flags[0].startswith("-"))
    parser = Parser(
        prog=prog,
        usage=" ".join((prog, "[OPTIONS]", *positionals)),
        description=f"{verb.help[0].upper()}{verb.help[1:]}. {verb.details}".strip(),
        allow_abbrev=False,
    )
    for flags, options in verb.arguments:
        parser.add_argument(*flags, **options)
    _add_everywhere(parser)
    return parser


def _add_everywhere(parser: Parser) -> None:
    """SUPPRESS, so that the parser of the verb does not undo what stood before the verb."""
    group = parser.add_argument_group("options of every verb, before or after it")
    for flags, options in EVERYWHERE:
        group.add_argument(*flags, default=argparse.SUPPRESS, **options)


def _unknown_verb(prog: str, word: str, names: list[str]) -> Exception:
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean '{prog} {near[0]}'" if near else f"one of {', '.join(names)}"
    return bad_usage(f"unknown verb {word!r}", hint)

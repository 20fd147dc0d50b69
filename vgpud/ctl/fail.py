"""Prints errors: text for people, or a document if the output is JSON or YAML."""

import errno
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vgpud.ctl.table import clean
from vgpud.ctl.terminal import Terminal
from vgpud.model.errors import ErrorCode, Exit, VgpuError

# Errors whose details are always printed: they have a reason for each device, or a line for each wrong key.
DETAILS_MATTER = (
    ErrorCode.DENIED_BY_POLICY,
    ErrorCode.NO_CAPACITY,
    ErrorCode.IMPOSSIBLE,
    ErrorCode.UNSUPPORTED,
    ErrorCode.BAD_POLICY,
)

# a reason for one device, in the form that planner/choose.py writes
_OF_DEVICE = re.compile(r"device (?P<index>\d+) \([^ )]+\): (?P<text>.*)", re.S)


class CommandFailed(VgpuError):
    """A command cannot be executed. The exit codes of this class and of CommandNotFound are those that POSIX
    specifies for shells (XCU 2.8.2).
    """

    exit_code = 126


class CommandNotFound(CommandFailed):
    exit_code = 127


def exit_code_of(error: VgpuError) -> int:
    return error.exit_code if isinstance(error, CommandFailed) else error.code.exit_code.value


def report(error: Exception, terminal: Terminal) -> int:
    """Prints the error and returns its exit code."""
    # an argument that is not UTF-8 cannot be put into a message of the API
    if isinstance(error, UnicodeEncodeError):
        text = ascii(error.object)[:80]
        error = VgpuError(ErrorCode.BAD_REQUEST, f"{text} is not UTF-8", "vgpud takes text in UTF-8")
    if not isinstance(error, VgpuError):
        if terminal.verbose:
            from traceback import print_exception

            print_exception(error)
        error = VgpuError(
            ErrorCode.BUG,
            f"vgpuctl failed with {type(error).__name__}: {error}",
            "run it again with -v and send what it says to the authors",
        )
    print_error(error, terminal)
    if terminal.is_machine:
        terminal.write_document(error_document(error))
    return exit_code_of(error)


def print_error(error: VgpuError, terminal: Terminal) -> None:
    mark = terminal.paint("vgpuctl:", "red", sys.stderr)
    print(f"{mark} {clean(error.sentence)} (E{error.code.number})", file=sys.stderr)
    for line in details_to_print(error, terminal.verbose):
        print(f"  {clean(line)}", file=sys.stderr)
    if error.hint and not terminal.quiet:
        print(f"{terminal.paint('hint:', 'bold', sys.stderr)} {clean(error.hint)}", file=sys.stderr)
    sys.stderr.flush()


def details_to_print(error: VgpuError, verbose: bool) -> tuple[str, ...]:
    """The details of an error that are printed. Details that only repeat the sentence are left out."""
    if not verbose and error.code not in DETAILS_MATTER:
        return ()
    said = len(error.details) == 1 and error.sentence in error.details[0]
    return () if said else _together([one for one in error.details if not _is_said(one, error.sentence)])


def _is_said(detail: str, sentence: str) -> bool:
    found = _OF_DEVICE.fullmatch(detail)
    return found is not None and found["text"] in sentence


def _together(details: Sequence[str]) -> tuple[str, ...]:
    """Joins the details of devices that have the same reason: one line for all of them is at the place of the
    first.
    """
    # for each sentence: the first detail that has it, and the indices of all devices that have it
    lines: dict[str, tuple[str, list[str]]] = {}
    for detail in details:
        found = _OF_DEVICE.fullmatch(detail)
        indices = lines.setdefault(found["text"] if found else detail, (detail, []))[1]
        indices += [found["index"]] if found else []
    return tuple(
        f"devices {', '.join(indices)}: {text}" if len(indices) > 1 else first
        for text, (first, indices) in lines.items()
    )


def error_document(error: VgpuError) -> dict[str, object]:
    from vgpud.ctl.terminal import machine

    return machine(
        "Error",
        {
            "number": error.code.number,
            "name": error.code.name,
            "sentence": error.sentence,
            "hint": error.hint,
            "details": list(error.details),
            "exitCode": exit_code_of(error),
        },
    )


def worst(codes: list[int]) -> int:
    """The exit code of the first failure in `codes`, or 0."""
    return next((code for code in codes if code != Exit.OK.value), Exit.OK.value)


def exec_error(name: str, error: OSError) -> CommandFailed:
    why = (error.strerror or str(error)).lower()
    sentence = f"cannot run {name!r}: {why}"
    if error.errno == errno.ENOENT:
        missing_interpreter = "/" in name and Path(name).exists()
        if not missing_interpreter:
            return CommandNotFound(ErrorCode.BAD_REQUEST, sentence, "check the name and PATH")
        return CommandFailed(ErrorCode.BAD_REQUEST, sentence, "install the interpreter of its first line")
    return CommandFailed(
        ErrorCode.BAD_REQUEST, sentence, "check that it is executable, and built for this machine"
    )

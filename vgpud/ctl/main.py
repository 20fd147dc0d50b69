"""The entry point of vgpuctl. It imports no large module, so that `--help` is fast."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, cast

from vgpud.ctl.parse import output_options, parse

if TYPE_CHECKING:
    from vgpud.ctl.terminal import Terminal
    from vgpud.ctl.verbs import Verb

EXIT_INTERRUPTED = 130  # exit code after Ctrl-C, as in shells: 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # exit code if the reader of a pipe has ended, as in shells: 128 + SIGPIPE
EXIT_INTERNAL = 70  # equals model.errors.Exit.INTERNAL, which is not imported so that --help is fast


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; `vgpuctl run` returns only if it fails."""
    _hold_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        # A label with characters that the locale lacks is escaped, so that it does not end a listing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:
        # argparse raises SystemExit after it has printed help (0); a signal handler raises it with another
        # code
        code = int(ended.code or 0)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OSError as error:
        code = _unwritten(error)
    return _flush(code)


def _hold_closed_streams() -> None:
    """Opens /dev/null for each standard stream that the caller has closed. Otherwise a socket could get the
    stream's number, and the command of `vgpuctl run` would inherit it. The opened descriptors close on exec.
    A write to standard output fails as before, and messages are dropped.
    """
    for number, name, how in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if taken != number:
                os.dup2(taken, number, inheritable=False)
                os.close(taken)
            setattr(sys, name, open(number, how, closefd=False))  # noqa: SIM115 - for the whole process


def _flush(code: int) -> int:
    """Flushes standard output and returns the exit code. If standard output cannot be written, the rest of
    the output is dropped; otherwise the interpreter would print an error at its end.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _unwritten(error)
    return code


def _unwritten(error: OSError) -> int:
    """The exit code after a failed write to standard output. For a closed pipe vgpuctl prints nothing; any
    other failure (a full disk) is printed.
    """
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    with suppress(OSError):
        print(f"vgpuctl: cannot write the answer: {(error.strerror or str(error)).lower()}", file=sys.stderr)
    return EXIT_INTERNAL


def _run(argv: Sequence[str]) -> int:
    from vgpud.ctl.terminal import Terminal

    try:
        verb, arguments = parse(argv)
    except OSError:  # help could not be written to standard output
        raise
    except Exception as error:
        return _report(error, Terminal.of(output_options(argv)))

    terminal = Terminal.of(arguments, verb.streams)
    try:
        function = _function(verb)
        if getattr(arguments, "watch", False):
            from vgpud.ctl.again import again

            return again(function, arguments, terminal)
        return function(arguments, terminal)
    except OSError:
        # `main` reports an OSError as a failed write to standard output: other code of vgpuctl turns its
        # OSErrors into VgpuErrors
        raise
    except Exception as error:
        # An unexpected exception is printed as a numbered error with one sentence, in place of a traceback.
        return _report(error, terminal)


def _function(verb: "Verb") -> "Callable[[Namespace, Terminal], int]":
    module, name = verb.function.split(":")
    return cast("Callable[[Namespace, Terminal], int]", getattr(import_module(f"vgpud.ctl.{module}"), name))


def _report(error: Exception, terminal: "Terminal") -> int:
    from vgpud.ctl.fail import report

    return report(error, terminal)

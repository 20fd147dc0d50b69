"""Every command of ours that any page of docs/ or the README names is one that the program itself takes.

Pages of test_console.py are run besides; here the parser of the program judges, so that no page keeps an
option or a verb that is gone. A sentence may name a verb without what it asks for.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.simnode import ROOT
from vgpud.ctl.parse import parse
from vgpud.model.errors import VgpuError

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
PROGRAMS = ("vgpuctl", "vgpu-sim")
#: A line of a block, indented or fenced, with or without a prompt; and a span of code within a sentence.
LINE = re.compile(rf"^(?:    |\$ |)(?:sudo )?((?:{'|'.join(PROGRAMS)}) .*?)$", re.MULTILINE)
SPAN = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`\n]+)`")
#: What stands for a number where the program wants one.
NUMBERS = {"SECONDS": "5", "N": "1", "BYTES": "1GiB", "SIZE": "1GiB", "PID": "4343"}


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Each with whether it stands in a sentence."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    \S.*$", text, re.MULTILINE)
    for block in (*blocks, *indented):
        yield from ((command, False) for command in LINE.findall(block))
    yield from ((command, True) for command in SPAN.findall(text))


def words(command: str) -> list[str] | None:
    """As a shell would have them; None where something is left out."""
    plain = re.sub(r"\s\[([^\]]*)\]", r" \1", command)  # optional words are tried too
    if "..." in plain or "OPTIONS" in plain or plain.split()[0].endswith(":"):
        return None
    lexed = shlex.shlex(plain, posix=True, punctuation_chars=True)
    lexed.whitespace_split = True
    found: list[str] = []
    for word in lexed:
        if word in ("|", ">", ">>", "&&", ";", "||", "&", ")"):
            break
        found.append(NUMBERS.get(word, word))
    return found


def vgpuctl(argv: list[str]) -> None:
    parse(argv)


def vgpu_sim(argv: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "native" / "sim"))
    try:
        from vgpu_sim import cli
    finally:
        sys.path.pop(0)
    cli._parser().parse_args(argv)


TAKEN: dict[str, Callable[[list[str]], None]] = {"vgpuctl": vgpuctl, "vgpu-sim": vgpu_sim}


def refused(command: list[str]) -> str | None:
    """Why the program would not take it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            TAKEN[command[0]](command[1:])
    except VgpuError as error:
        return error.sentence
    except SystemExit as left:
        return None if left.code in (0, None) else said.getvalue().strip().splitlines()[-1]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page: Path) -> None:
    wrong = {}
    for command, in_sentence in commands(page):
        argv = words(command)
        why = refused(argv) if argv is not None else None
        if why is not None and not (in_sentence and "arguments are required" in why):
            wrong[command] = why
    assert wrong == {}


def test_one_that_is_gone_would_be_seen() -> None:
    assert sum(1 for page in PAGES for command, _ in commands(page) if words(command)) > 100
    assert refused(["vgpuctl", "alloc", "--no-such-option"]) is not None
    assert refused(["vgpu-sim", "no-such-verb"]) is not None
    assert refused(["vgpuctl", "alloc", "--memory", "1GiB"]) is None

"""Writes manual pages and shell completions: `python packaging/manuals.py OUT` fills OUT/man and
OUT/completions.

The prose is in docs/man. The lists of verbs, options, settings and keys come from the code that they
describe. The output format is man(7). The sources use a subset of Markdown: headings, paragraphs, **bold**,
*italic*, `code`, indented examples, and lists of a term with its text on the next line after ": ".
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from vgpud import __version__
from vgpud.ctl.arguments import Argument
from vgpud.ctl.completion import bash, fish, zsh
from vgpud.ctl.parse import EVERYWHERE
from vgpud.ctl.verbs import VERBS, Group, Verb
from vgpud.model.errors import Exit
from vgpud.model.journal import Message
from vgpud.policy.effective import as_toml
from vgpud.policy.model import TABLES
from vgpud.settings import Settings

SOURCES = Path(__file__).resolve().parents[1] / "docs" / "man"
EXITS = {
    Exit.OK: "done",
    Exit.DIFFERS: "the answer is no",
    Exit.BAD_ARGUMENT: "bad argument",
    Exit.UNSUPPORTED: "not supported, by this device or this version",
    Exit.NO_PERMISSION: "no permission",
    Exit.NOT_FOUND: "no such allocation or device",
    Exit.DRIVER_MISSING: "the NVIDIA driver is not loaded",
    Exit.NVML_MISSING: "NVML is missing",
    Exit.GPU_LOST: "the device is lost",
    Exit.UNREACHABLE: "vgpud cannot be reached",
    Exit.NO_CAPACITY: "no capacity",
    Exit.DENIED: "denied by policy or quota",
    Exit.CONFLICT: "in conflict with what is there",
    Exit.TIMEOUT: "timed out",
    Exit.DEGRADED: "something has failed: status, doctor, mps ls",
    Exit.INTERNAL: "internal error",
    Exit.CONFIG: "bad policy or setting",
}
_TESTS_ONLY = {"fault_point"}


def escape(text: str) -> str:
    """Returns plain text for man(7), which must not be read as escapes or as requests at the start of
    a line.
    """
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def inline(text: str) -> str:
    """Returns a paragraph in man(7) with its bold, italic and code spans."""
    parts = re.split(r"(\*\*[^*]+\*\*|\*[^*]+\*|`[^`]+`)", text)
    shown = []
    for part in parts:
        if part.startswith("**"):
            shown.append(f"\\fB{escape(part[2:-2])}\\fR")
        elif part.startswith("*") and len(part) > 1:
            shown.append(f"\\fI{escape(part[1:-1])}\\fR")
        elif part.startswith("`"):
            shown.append(f"\\fB{escape(part[1:-1])}\\fR")
        else:
            shown.append(escape(part))
    return re.sub(r"^([.'])", r"\\&\1", "".join(shown))


def term(name: str, text: str) -> str:
    return f".TP\n{inline(name)}\n{inline(text)}"


def page(source: str) -> str:
    """Returns one page in man(7)."""
    source = source.replace("@audit@", Message.AUDIT.value)
    first, _, rest = source.partition("\n")
    title = re.fullmatch(r'# (\S+) (\d) "(.+)"', first)
    if title is None:
        raise ValueError(f"a page begins with its name, section and purpose, not with {first!r}")
    name, section, purpose = title.groups()
    head = f'.TH "{name.upper()}" "{section}" "" "vgpud {__version__}" "vgpud"'
    lines = [head, ".SH NAME", f"{escape(name)} \\- {escape(purpose)}"]
    for block in re.split(r"\n\s*\n", rest.strip("\n")):
        lines += _block(block)
    return "\n".join(lines) + "\n"


def _block(block: str) -> Iterator[str]:
    heading = re.match(r"## (.+)\n?", block)
    break_before = ".PP\n"
    if heading:
        yield f'.SH "{heading[1]}"'
        block = block[heading.end() :]
        break_before = ""
    if not block:
        return
    if block.startswith("@"):
        yield from LISTS[block[1:].strip()]()
    elif block.startswith("    "):
        yield f"{break_before}.EX"
        yield from (escape(line[4:]) or "\\&" for line in block.splitlines())
        yield ".EE"
    elif "\n: " in block:
        name, _, text = block.partition("\n: ")
        yield term(name, text.replace("\n", " "))
    else:
        yield break_before + inline(block.replace("\n", " "))


def _option(argument: Argument) -> tuple[str, str]:
    """Returns an option as typed on the command line, and its help text."""
    flags, settings = argument
    value = settings.get("metavar") or "|".join(settings.get("choices", ()))
    if not flags[0].startswith("-"):
        return f"*{value or flags[0]}*", settings["help"]
    shown = ", ".join(f"**{flag}**" for flag in flags)
    takes = settings.get("action") not in ("store_true",)
    return f"{shown} *{value}*" if takes and value else shown, settings["help"]


def everywhere() -> Iterator[str]:
    for argument in EVERYWHERE:
        yield term(*_option(argument))


def verbs() -> Iterator[str]:
    for entry in VERBS:
        if isinstance(entry, Group):
            for verb in entry.verbs:
                yield from _verb(f"{entry.name} {verb.name}", verb)
        else:
            yield from _verb(entry.name, entry)


def _verb(words: str, verb: Verb) -> Iterator[str]:
    plain = [_option(argument)[0] for argument in verb.arguments if not argument.flags[0].startswith("-")]
    yield f'.SS "{words}"'
    yield inline(" ".join((f"**vgpuctl {words}**", "[*OPTIONS*]", *plain)))
    details = f" {verb.details}" if verb.details else ""
    yield ".PP\n" + inline(f"{verb.help[0].upper()}{verb.help[1:]}.{details}")
    for argument in verb.arguments:
        yield term(*_option(argument))


def examples() -> Iterator[str]:
    """Yields the examples of every verb; a test parses each one."""
    verbs = (verb for entry in VERBS for verb in (entry.verbs if isinstance(entry, Group) else (entry,)))
    yield ".EX"
    yield from (escape(line) for verb in verbs for line in verb.examples)
    yield ".EE"


def exits() -> Iterator[str]:
    for code, text in EXITS.items():
        yield term(f"`{code.value}`", text)
    yield term("`126`, `127`", "**run**: the command cannot be executed, or is not there")
    yield term("`130`, `141`", "interrupted, or the reader of standard output went away")


def settings() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        if name not in _TESTS_ONLY:
            default = "" if field.default in ("", None) else f"; {field.default}"
            yield term(f"`VGPUD_{name.upper()}`", f"{field.description}{default}")


def policy() -> Iterator[str]:
    for table, model in TABLES.items():
        arrays = ("device", "quota")
        shown = f"[[{table}]]" if table in arrays else f"[{table}]" if table else "Top level"
        yield f'.SS "{shown}"'
        for name, field in model.model_fields.items():
            if f"{table}.{name}".lstrip(".") not in TABLES:
                yield term(f"`{name}`", f"{field.description}{_default(field.default)}")


def _default(value: object) -> str:
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel | tuple):
        return ""
    return f"; default {as_toml(value)}"


LISTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "everywhere": everywhere,
    "verbs": verbs,
    "examples": examples,
    "exits": exits,
    "settings": settings,
    "policy": policy,
}


def write(out: Path) -> None:
    for folder in ("man", "completions"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.md")):
        (out / "man" / source.stem).write_text(page(source.read_text()))
    # the shells' completion folders require these file names
    for name, script in (("vgpuctl", bash()), ("_vgpuctl", zsh()), ("vgpuctl.fish", fish())):
        (out / "completions" / name).write_text(script)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: manuals.py OUT")
    write(Path(sys.argv[1]))

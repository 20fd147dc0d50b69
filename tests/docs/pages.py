"""Parses the commands on the pages of docs/, and says which test runs each.

In a `console` block each line that begins with "$ " is a command, which one bash for the page runs. The lines
after it are its output, as it was recorded. Values that differ between runs match by their form (_FORMS), and
answers that are the machine's (_MACHINES) by their headings. "..." within a line matches any text. "[exit N]"
is the first line if the exit code is not 0. The word after `console` says where the block is run: no word,
on a simulated node (test_console.py); `machine`, as root on an installed Debian 12
(tests/packaging/test_documented.py); `containers`, `slurm` or `kubernetes`, beside these programs
(test_doors.py); `checkout`, in a clone of the repository, which is not run: NOT_RUN has the reasons.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.simnode import ROOT

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
PLACES = ("", "machine", "containers", "slurm", "kubernetes", "checkout")
#: Blocks in these languages are not run as commands. `toml`, `yaml`, `json` and `python` have tests of their
#: own.
QUIET = ("text", "toml", "ini", "yaml", "json", "python", "mermaid")
#: Lines and code spans that begin with one of these are commands.
_OURS = ("vgpuctl", "vgpu-sim", "vgpud", "vgpu-runtime", "vgpu-hook", "./dev")
_SYSTEMS = (
    "systemctl",
    "journalctl",
    "systemd-analyze",
    "usermod",
    "apt",
    "dpkg",
    "install",
    "eval",
    "cp",
    "tar",
)
_OTHERS = ("kubectl", "docker", "podman", "nvidia-smi", "nvidia-ctk", "srun", "sbatch", "curl", "grpcurl")
PROGRAMS = (*_OURS, *_SYSTEMS, *_OTHERS, "python", "pytest", "pip", "sudo")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    language: str
    place: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    code: int
    printed: tuple[str, ...]


def name_of(page: Path) -> str:
    return page.stem


def blocks(page: Path) -> list[Block]:
    found = []
    for match in _FENCE.finditer(page.read_text()):
        language, _, place = match["info"].partition(" ")
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines()]
        found.append(Block(language, place, "\n".join(lines) + "\n"))
    return found


def in_place(page: Path, place: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "console" and block.place == place]


def pages_of(place: str) -> list[Path]:
    return [page for page in PAGES if in_place(page, place)]


def commands(block: Block) -> list[Command]:
    found: list[Command] = []
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], 0, ()))
        elif code := re.fullmatch(r"\[exit (\d+)\]", line):
            found[-1] = Command(found[-1].line, int(code[1]), ())
        else:
            found[-1] = Command(found[-1].line, found[-1].code, (*found[-1].printed, line))
    return found


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """The commands among the code spans of sentences. The bare name of a program is not a command."""
    return [span for span in _SPAN.findall(prose(page)) if is_command(span) and " " in span]


def is_command(text: str) -> bool:
    return text.partition(" ")[0] in PROGRAMS


def plain(line: str) -> str:
    """The command without its comment and with single spaces between words."""
    return " ".join(re.sub(r"\s+#(?: .*)?$", "", line).split())


#: Commands whose answers depend on the machine, the moment, or on what other pages did.
_MACHINES = re.compile(
    r"vgpuctl (doctor|top|mps ls|events|policy show --origin)|apt |systemctl status|journalctl|grpcurl"
    r"|vgpud --restore|sbatch|vgpu-sim run --state /run"
)


def expected(command: Command) -> re.Pattern[str]:
    """A pattern for the output of a command. For a command that _MACHINES matches, only the headings must
    match, and a page that shows no output matches any.
    """
    if not _MACHINES.search(command.line):
        return pattern(command.printed)
    if not command.printed:
        return re.compile(r"(?:.*\n)*")
    heads = [pattern((line,)).pattern for line in command.printed if line.isupper()]
    return re.compile("".join(rf"(?:.*\n)*?{head}" for head in heads) + r"(?:.*\n)+")


def pattern(lines: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern for the lines. Spaces of any length match, because the width of columns varies."""
    parts = []
    for line in lines:
        if line.split()[:1] and line.split()[0] in _VARYING:
            parts.append(rf"[ ]*{re.escape(line.split()[0])}[ ].*\n")
        else:
            words = r"[ ]+".join(_loose(word) for word in line.split())
            words = _NUMBERED.sub("[0-9]+", words)
            parts.append(r"[ ]*" + words + r"[ ]*\n")
    return re.compile("".join(parts))


#: Values that differ between runs. The page has an example, and the test compares only their form.
_FORMS = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z",  # a time
    r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"[0-9a-f]{12}",  # an allocation's id
    r"[0-9]+(?:ms|s|min|h)",  # a duration
)


#: First words of lines whose values depend on the machine, the version or the run.
_VARYING = ("host:", "vgpud:", "revision:", "request:")
#: The revision before the time of an event. The pages have one example, and revisions go on from page to
#: page.
_NUMBERED = re.compile(r"^[0-9]+(?=\[ \]\+\[0-9\]\{4\}-)")


def _loose(word: str) -> str:
    for form in _FORMS:
        found = re.search(rf"(?<![\w-]){form}(?![\w-])", word)
        if found is not None:
            return _loose(word[: found.start()]) + form + _loose(word[found.end() :])
    return re.escape(word).replace(r"\.\.\.", r".*")

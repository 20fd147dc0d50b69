"""The origin of a policy key (file and line), and the problems found there."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Origin:
    """A place in a file; without a file the built-in default, without a line the file as a whole."""

    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return "built-in"
        name = shown_path(self.file)
        return name if self.line is None else f"{name}:{self.line}"


BUILT_IN = Origin()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a policy file; `key` is a spelt key path, "" for the file as a whole."""

    origin: Origin
    key: str
    sentence: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.origin}: {self.key}" if self.key else str(self.origin)
        return f"{place}: {self.sentence}" + (f"; {self.hint}" if self.hint else "")


def shown_path(path: Path) -> str:
    """`path` as text that can be sent and printed on one line, whatever bytes its name has."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

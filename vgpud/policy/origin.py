"""The origin of a policy key (file and line), and the problems found there."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Origin:
    """A place in a policy file. Without a line it is the whole file; without a file it is the built-in
    default.
    """

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
    """A problem in a policy file. `key` is the key path as text, or "" for the whole file."""

    origin: Origin
    key: str
    sentence: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.origin}: {self.key}" if self.key else str(self.origin)
        return f"{place}: {self.sentence}; {self.hint}"


def shown_path(path: Path) -> str:
    """The text of a path on one line. Bytes that are not UTF-8 and characters that are not printable are
    replaced.
    """
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

"""Finds the line of each key in a TOML text, which the standard parser does not report.

The scanner follows the grammar of TOML 1.0 (https://toml.io/en/v1.0.0). The scanner does not parse values; it
records only the line on which each value begins. So it accepts all text that `tomllib` accepts, and some text
that is not TOML. It runs in linear time and bounds the nesting. `tomllib` does neither: a key with 100 000
dots takes `tomllib` minutes.
"""

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress

KeyPath = tuple[str | int, ...]

# maximum nesting; a policy has four levels
MAX_DEPTH = 32

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_INLINE_BLANK = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Triple-quoted forms are tried first. Up to two quotes at their end belong to the text.
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


class TooDeepError(Exception):
    """Raised if tables, arrays or dotted keys are nested more than MAX_DEPTH deep. `line` counts from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is nested more than {MAX_DEPTH} levels deep")
        self.line = line


def locate(text: str) -> Mapping[KeyPath, int]:
    """The line, counted from 1, of every table, key and array element of `text`.

    The line is that of the first mention; elements of arrays have their number as key. Raises ValueError for
    some text that is not TOML, and TooDeepError.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


def repeated(text: str, line: int) -> tuple[KeyPath, int] | None:
    """The key or table that stands on `line` and on an earlier line, and that earlier line. None if there is
    none, or if the scanner does not get to the line.
    """
    scanner = _Scanner(text)
    with suppress(ValueError, TooDeepError):
        scanner.document()
    path = scanner.repeats.get(line)
    return None if path is None else (path, scanner.lines[path])


def spell(path: KeyPath) -> str:
    """A key path as text, for example device[0].match.name. Unusual keys are quoted, so that the text stays
    on one line.
    """
    spelt = ""
    for part in path:
        if isinstance(part, int):
            spelt += f"[{part}]"
            continue
        name = part if _BARE_KEY.fullmatch(part) else quote(part)
        spelt += f".{name}" if spelt else name
    return spelt


def quote(text: str) -> str:
    """`text` as a TOML basic string, so that it stays on one line."""
    escaped = (c if c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    return f'"{"".join(escaped)}"'


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.repeats: dict[int, KeyPath] = {}  # by line, the last path there that was mentioned before
        self.array_lengths: dict[KeyPath, int] = {}
        self._counted_to = 0
        self._line = 1

    def document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._key_value(table)
            self._skip(_BLANK)

    def _header(self) -> KeyPath:
        line = self._line_here()
        array = self.text.startswith("[[", self.at)
        self.at += 2 if array else 1
        keys = self._keys()
        self._expect("]]" if array else "]")
        path: KeyPath = ()
        for key in keys[:-1]:
            path = self._enter((*path, key), line)
        path = (*path, keys[-1])
        if not array:
            return self._enter(path, line)
        self._note(path, line)
        element = (*path, self.array_lengths.get(path, 0))
        self.array_lengths[path] = self.array_lengths.get(path, 0) + 1
        self._note(element, line)
        return element

    def _enter(self, path: KeyPath, line: int) -> KeyPath:
        """The path under which the keys of table `path` are. For an array of tables, they are under its last
        element.
        """
        self._note(path, line)
        length = self.array_lengths.get(path)
        return path if length is None else (*path, length - 1)

    def _key_value(self, table: KeyPath) -> None:
        line = self._line_here()
        path = table
        for key in self._keys():
            path = (*path, key)
            self._note(path, line)
        self._expect("=")
        self._skip(_INLINE_BLANK)
        self._value(path)

    def _keys(self) -> list[str]:
        keys = [self._key()]
        while self.text.startswith(".", self.at):
            self.at += 1
            keys.append(self._key())
        return keys

    def _key(self) -> str:
        self._skip(_INLINE_BLANK)
        bare = _BARE_KEY.match(self.text, self.at)
        raw = bare[0] if bare else self._match(_STRING)
        if bare:
            self.at = bare.end()
        self._skip(_INLINE_BLANK)
        return raw if bare else str(tomllib.loads(f"key = {raw}")["key"])

    def _value(self, path: KeyPath) -> None:
        first = self.text[self.at : self.at + 1]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first in ('"', "'"):
            self._match(_STRING)
        else:
            self._match(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)
        index = 0
        while not self.text.startswith("]", self.at):
            element = (*path, index)
            self._note(element, self._line_here())
            self._value(element)
            index += 1
            self._skip(_BLANK)
            if self.text.startswith(",", self.at):
                self.at += 1
                self._skip(_BLANK)
            elif not self.text.startswith("]", self.at):
                raise self._lost()
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)
        while not self.text.startswith("}", self.at):
            self._key_value(path)
            self._skip(_BLANK)
            if self.text.startswith(",", self.at):
                self.at += 1
                self._skip(_BLANK)
            elif not self.text.startswith("}", self.at):
                raise self._lost()
        self.at += 1

    def _note(self, path: KeyPath, line: int) -> None:
        if len(path) > MAX_DEPTH:
            raise TooDeepError(line)
        if self.lines.setdefault(path, line) != line:
            self.repeats[line] = path

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted_to, self.at)
        self._counted_to = self.at
        return self._line

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self._lost()
        self.at = found.end()
        return found[0]

    def _expect(self, mark: str) -> None:
        if not self.text.startswith(mark, self.at):
            raise self._lost()
        self.at += len(mark)

    def _lost(self) -> ValueError:
        return ValueError(f"line {self._line_here()} is not TOML")

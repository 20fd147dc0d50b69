"""Plain aligned tables. Their form does not depend on the terminal's width, so scripts can rely on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

GAP = "  "


class Column(NamedTuple):
    """A column of a table. `value` makes the cell of an item. `styles` maps the whole text of a cell to its
    style.
    """

    header: str
    value: Callable[[Any], str] = str
    right: bool = False
    wide: bool = False  # the column is shown only with -o wide
    styles: Mapping[str, str] = {}


class Table(NamedTuple):
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, columns: Sequence[Column], items: Iterable[Any]) -> "Table":
        """A table with one row for each item."""
        return cls(columns, [[column.value(item) for column in columns] for item in items])

    @property
    def has_headers(self) -> bool:
        return any(column.header for column in self.columns)


def facts(pairs: Sequence[tuple[str, str]], styles: Mapping[str, str] | None = None) -> Table:
    """A table of names and values, one pair per line. Pairs without a value are left out."""
    rows = [(f"{name}:", value) for name, value in pairs if value]
    return Table((Column(""), Column("", styles=styles or {})), rows)


def render(
    table: Table, wide: bool, headers: bool, paint: Callable[[str, str], str] = lambda text, _style: text
) -> list[str]:
    """The lines of a table without trailing blanks; an empty cell is "-", so that fields can be counted."""
    kept = [i for i, column in enumerate(table.columns) if wide or not column.wide]
    columns = [table.columns[i] for i in kept]
    rows = [[clean(row[i]) or "-" for i in kept] for row in table.rows]
    top = [column.header for column in columns]
    measured = [*rows, top] if headers and table.has_headers else rows
    if not measured:
        return []
    widths = [max(width(row[i]) for row in measured) for i in range(len(columns))]
    lines = [_line(row, columns, widths, paint) for row in rows]
    if headers and table.has_headers:
        heading = [column._replace(styles={column.header: "bold"}) for column in columns]
        lines.insert(0, _line(top, heading, widths, paint))
    return lines


def _line(
    row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], paint: Callable[[str, str], str]
) -> str:
    last = len(row) - 1
    cells = []
    for i, (text, column) in enumerate(zip(row, columns, strict=True)):
        blanks = " " * (widths[i] - width(text))
        shown = paint(text, column.styles.get(text, ""))
        if column.right:
            cells.append(blanks + shown)
        else:
            cells.append(shown if i == last else shown + blanks)
    return GAP.join(cells)


def clean(text: str) -> str:
    """Makes text from tenants safe for a terminal: no control characters, no line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def width(text: str) -> int:
    """Number of terminal cells that `text` takes (Unicode Standard Annex 11, East Asian Width)."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)

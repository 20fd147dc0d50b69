"""The map of the code in docs/architecture.md agrees with the code."""

import ast
import re
from collections import defaultdict

from tests.lint.test_house import INNER_MAY_IMPORT, MAY_IMPORT
from tests.simnode import ROOT
from vgpud.model.lifecycle import TABLE, Change, Phase

PAGE = ROOT / "docs" / "architecture.md"


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    folder = ROOT / "vgpud" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    documented = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(documented.partition("\n\n")[0].split()).rstrip(".")


def rooms_table() -> str:
    """The table of rooms, in an order in which each room imports only from rooms above it."""
    rows = [
        f"| `{room}` | {', '.join(f'`{r}`' for r in sorted(below[room])) or '-'} | {purpose(room)} |"
        for below in (MAY_IMPORT, INNER_MAY_IMPORT)
        for room in in_order(below)
    ]
    return "\n".join(["| room | may import | holds |", "|---|---|---|", *rows])


def test_the_table_of_rooms_equals_the_table_of_the_lint_rule() -> None:
    shown = re.search(r"<!-- rooms -->\n(.*?)\n<!-- /rooms -->", PAGE.read_text(), re.S)
    assert shown is not None
    assert shown[1] == rooms_table(), "run: python -m tests.docs.test_architecture"


def in_order(table: dict[str, set[str]]) -> list[str]:
    placed: list[str] = []
    while len(placed) < len(table):
        free = sorted(r for r, below in table.items() if r not in placed and below <= set(placed))
        assert free, f"the rooms {sorted(set(table) - set(placed))} import each other in a circle"
        placed += free
    return placed


def states_picture() -> str:
    """The table of transitions as a state diagram in Mermaid. Releases and repairs are left out, because the
    page's text describes them.
    """
    arrows = defaultdict(list)
    for (start, change), end in TABLE.items():
        if change not in (Change.REPAIRED, Change.RELEASE):
            arrows[start, end].append(change.value)
    names = {phase: "[*]" if phase is Phase.ABSENT else phase.value for phase in Phase}
    lines = [f"    {names[a]} --> {names[b]}: {', '.join(changes)}" for (a, b), changes in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def test_the_picture_of_states_equals_the_table_of_transitions() -> None:
    shown = re.search(r"<!-- states -->\n(.*?)\n<!-- /states -->", PAGE.read_text(), re.S)
    assert shown is not None
    assert shown[1] == states_picture(), "run: python -m tests.docs.test_architecture"


def test_each_path_on_the_map_exists() -> None:
    paths = re.findall(r"`((?:vgpud|native|tests|configs|systemd)/[\w./-]+)`", PAGE.read_text())
    assert len(paths) > 50
    assert [path for path in paths if path != "vgpud/lease_layout.py" and not (ROOT / path).exists()] == []


if __name__ == "__main__":  # python -m tests.docs.test_architecture: writes table and picture into the page
    page = PAGE.read_text()
    for name, new in (("rooms", rooms_table()), ("states", states_picture())):
        marked = f"<!-- {name} -->\n{new}\n<!-- /{name} -->"
        old = re.search(f"<!-- {name} -->.*<!-- /{name} -->", page, re.S)
        assert old is not None
        page = page.replace(old[0], marked)
    PAGE.write_text(page)

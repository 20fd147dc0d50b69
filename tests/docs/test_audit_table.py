"""docs/metrics.md lists each change that vgpud makes by itself, with the source file that writes its audit
line.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REASONED = ("because", "by_itself")  # the functions of vgpud.audit that take the reason of a change


def table() -> list[tuple[str, str]]:
    """The change and the file in each row of the table in docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = page.split("<!-- automatic -->")[1].split("<!-- /automatic -->")[0]
    found = re.findall(r"^\| ([^|`]+) \| [^|]+ \| `([^`]+)` \|$", rows, re.MULTILINE)
    return [(changes.strip(), file) for changes, file in found]


def calls() -> Iterator[tuple[str, str, str]]:
    """For each call of vgpud.audit: the function, the name of the change ("" if it is not given), and the
    file.
    """
    for path in sorted((ROOT / "vgpud").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "audit." in text else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "audit"
            ):
                first = node.args[0] if node.args else None
                is_name = isinstance(first, ast.Constant) and node.func.attr == "automatic"
                change = str(first.value) if is_name and isinstance(first, ast.Constant) else ""
                yield node.func.attr, change, str(path.relative_to(ROOT))


def test_the_table_lists_exactly_the_automatic_changes_that_the_code_makes() -> None:
    named = {(change, file) for function, change, file in calls() if function == "automatic"}
    reasoned = {file for function, _, file in calls() if function in REASONED}
    rows = table()
    assert named <= set(rows)
    assert {row for row in rows if row[1] not in reasoned} <= named
    assert {file for _, file in rows} == reasoned | {file for _, file in named}

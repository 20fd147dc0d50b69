"""The table of docs/modes.md says what each mode enforces on each driver branch. The simulator shows that it
is right.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conditions import needs
from tests.e2e.matrix import BRANCHES, column, table
from tests.simnode import ROOT


@needs("cgroups")
def test_the_table_of_modes_and_driver_branches_equals_what_simulated_drivers_enforce(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "modes.md").read_text()
    told = page.split("<!-- matrix -->\n")[1].split("<!-- /matrix -->")[0].strip()
    with ThreadPoolExecutor(2) as pool:
        columns = list(pool.map(lambda branch: column(branch, tmp_path), BRANCHES))
    assert table(dict(zip(BRANCHES, columns, strict=True))) == told

"""The claims of the demo. Each is printed with the observation. A claim that does not hold makes the demo
fail.
"""

import sys
import time
from dataclasses import dataclass, field


@dataclass
class Checks:
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def check(self, claim: str, held: bool, seen: object = "") -> bool:
        self._add("ok" if held else "FAILED", claim, str(seen))
        return held

    def skip(self, claim: str, why: str) -> None:
        self._add("skipped", claim, why)

    def _add(self, verdict: str, claim: str, seen: str) -> None:
        self.rows.append((verdict, claim, seen))
        print(f"  {verdict:8}{claim}" + (f"  [{seen}]" if seen else ""), flush=True)

    @property
    def failed(self) -> int:
        return sum(verdict == "FAILED" for verdict, _, _ in self.rows)

    def table(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="what was checked", title_justify="left")
        for column in ("", "claim", "seen"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=max(100, Console().width), file=sys.stdout)
        with console.capture() as captured:
            console.print(table)
        done = sum(verdict == "ok" for verdict, _, _ in self.rows)
        skipped = sum(verdict == "skipped" for verdict, _, _ in self.rows)
        seconds = time.monotonic() - self.started
        return captured.get() + (f"{done} held, {self.failed} failed, {skipped} skipped, in {seconds:.1f} s")

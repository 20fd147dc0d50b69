"""The claims of the demo. Each is printed with the observation. A claim that does not hold makes the demo
fail.
"""

import time
from dataclasses import dataclass, field
from operator import itemgetter

from vgpud.ctl.table import Column, Table, render


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
        columns = [Column(header, itemgetter(at)) for at, header in enumerate(("", "claim", "seen"))]
        lines = render(Table.of(columns, self.rows), wide=False, headers=True)
        done = sum(verdict == "ok" for verdict, _, _ in self.rows)
        skipped = sum(verdict == "skipped" for verdict, _, _ in self.rows)
        seconds = time.monotonic() - self.started
        total = f"{done} held, {self.failed} failed, {skipped} skipped, in {seconds:.1f} s"
        return "\n".join(["what was checked", *lines, total])

"""The prepared claims and the answers that the kubelet got. A repeated request gets the same answer, also
after a restart and while the API server is down.
"""

from dataclasses import dataclass
from pathlib import Path

from vgpud.serve.statefile import StateFile


@dataclass(frozen=True, slots=True)
class Answer:
    """One device of a claim; of several devices in one allocation only the first has the CDI name."""

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...]
    share: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared claim. `request_ids` are those of its allocations; `answers` are set when all of
    them exist.
    """

    uid: str
    namespace: str
    name: str
    request_ids: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


class PreparedClaims(StateFile[Prepared]):
    """If the file cannot be read, claims are read from the API server again when the kubelet asks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "claims", Prepared, lambda claim: claim.uid)

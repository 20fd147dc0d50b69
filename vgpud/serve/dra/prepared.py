"""Keeps the prepared claims and the answers that the kubelet got. So a repeated request gets the same answer,
also after a restart and while the API server cannot be reached.
"""

from dataclasses import dataclass
from pathlib import Path

from vgpud.serve.statefile import StateFile


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the kubelet for one device of a claim. If an allocation has several devices, only the
    first has the CDI name.
    """

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...]
    share: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared claim. `request_ids` are those of its allocations. `answers` are set when all allocations
    exist.
    """

    uid: str
    namespace: str
    name: str
    request_ids: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


class PreparedClaims(StateFile[Prepared]):
    """The file of prepared claims. If it cannot be read, a claim is read from the API server again when the
    kubelet asks for it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "claims", Prepared, lambda claim: claim.uid)

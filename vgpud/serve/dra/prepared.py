"""Claims that were prepared, and what the kubelet was answered: so that it is answered the same again,
also after a restart of either, and while the API server is away."""

from dataclasses import dataclass
from pathlib import Path

from vgpud.serve.statefile import StateFile


@dataclass(frozen=True, slots=True)
class Answer:
    """One device of a claim; only the first of those that share an allocation carries its CDI name."""

    request: str
    pool: str
    device: str
    cdi: tuple[str, ...]
    share: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """`request_ids` are those of its allocations; `answers` come once all of them are made."""

    uid: str
    namespace: str
    name: str
    request_ids: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


class PreparedClaims(StateFile[Prepared]):
    """If the file cannot be read, claims are read from the API server again when the kubelet asks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "claims", Prepared, lambda claim: claim.uid)

"""Keeps the prepared claims and the answers that the kubelet got. So a repeated request gets the same answer,
also after a restart and while the API server cannot be reached.
"""

from dataclasses import dataclass

from vgpud.model.rows import Rows
from vgpud.serve.documents import Documents


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
class Monitor:
    """Admin access to cards, for one request of a claim. `name` is that of the CDI device."""

    name: str
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared claim. `request_ids` are those of its allocations. `answers` are set when all allocations
    and monitors exist.
    """

    uid: str
    namespace: str
    name: str
    request_ids: tuple[str, ...]
    answers: tuple[Answer, ...] = ()
    monitors: tuple[Monitor, ...] = ()


class PreparedClaims(Documents[Prepared]):
    """The prepared claims. A claim whose row cannot be read is read from the API server again when the
    kubelet asks for it.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, Prepared, lambda claim: claim.uid)

"""Claims that were prepared, and what the kubelet was answered: so that it is answered the same again,
also after a restart of either, and while the API server is away."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from vgpud.serve.statefile import read_state, write_state

log = structlog.get_logger(__name__)

_VERSION = 1


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


class PreparedClaims:
    """What changes them raises VgpuError(LEDGER_FAILED) if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._claims = _read(path)
        self._writing = asyncio.Lock()

    def __iter__(self) -> Iterator[Prepared]:
        return iter(tuple(self._claims.values()))

    def get(self, uid: str) -> Prepared | None:
        return self._claims.get(uid)

    async def put(self, claim: Prepared) -> None:
        await self._change(claim.uid, claim)

    async def drop(self, uid: str) -> None:
        if uid in self._claims:
            await self._change(uid, None)

    async def _change(self, uid: str, claim: Prepared | None) -> None:
        """A cancelled call leaves a thread that still writes: the change ends before the next one begins."""
        await asyncio.shield(self._write(uid, claim))

    async def _write(self, uid: str, claim: Prepared | None) -> None:
        async with self._writing:
            changed = {name: one for name, one in self._claims.items() if name != uid}
            if claim is not None:
                changed[uid] = claim
            body = {"version": _VERSION, "claims": [_plain(one) for one in changed.values()]}
            await asyncio.to_thread(write_state, self._path, body)
            self._claims = changed


def _plain(claim: Prepared) -> dict[str, Any]:
    return {
        "uid": claim.uid,
        "namespace": claim.namespace,
        "name": claim.name,
        "request_ids": list(claim.request_ids),
        "answers": [
            {"request": a.request, "pool": a.pool, "device": a.device, "cdi": list(a.cdi), "share": a.share}
            for a in claim.answers
        ],
    }


def _read(path: Path) -> dict[str, Prepared]:
    """Without it, claims are read from the API server again when the kubelet asks."""
    try:
        found = [_claim(entry) for entry in read_state(path, _VERSION).get("claims", ())]
    except (KeyError, TypeError) as error:
        log.warning("cannot read which claims are prepared", file=str(path), why=str(error))
        return {}
    return {claim.uid: claim for claim in found}


def _claim(entry: dict[str, Any]) -> Prepared:
    return Prepared(
        str(entry["uid"]),
        str(entry["namespace"]),
        str(entry["name"]),
        tuple(str(name) for name in entry["request_ids"]),
        tuple(
            Answer(
                str(a["request"]),
                str(a["pool"]),
                str(a["device"]),
                tuple(map(str, a["cdi"])),
                str(a.get("share", "")),
            )
            for a in entry["answers"]
        ),
    )

"""State beside the ledger is written in the order of its changes, also by calls that are cancelled."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from vgpud.serve import statefile
from vgpud.serve.dra.prepared import Prepared, PreparedClaims
from vgpud.serve.kubelet.holds import Hold, Holds


def claims_in(path: Path) -> tuple[Callable[[str], Awaitable[None]], Callable[[], set[str]]]:
    claims = PreparedClaims(path)
    return (lambda name: claims.put(Prepared(name, "ns", name, (name,)))), (
        lambda: {claim.uid for claim in claims}
    )


def holds_in(path: Path) -> tuple[Callable[[str], Awaitable[None]], Callable[[], set[str]]]:
    held = Holds(path)
    return (lambda name: held.put(Hold(name, "resource", frozenset({name})))), (
        lambda: {hold.request_id for hold in held}
    )


@pytest.mark.parametrize("opened", [claims_in, holds_in])
def test_a_cancelled_change_is_written_before_the_next(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, go, plain = threading.Event(), threading.Event(), statefile.write_state

    def held_up(path: Path, body: dict[str, Any]) -> None:
        writes.set()
        go.wait(60)
        plain(path, body)

    monkeypatch.setattr(statefile, "write_state", held_up)
    path = tmp_path / "state.json"

    async def story() -> None:
        put, names = opened(path)
        cancelled = asyncio.ensure_future(put("first"))
        await asyncio.to_thread(writes.wait, 60)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        second = asyncio.ensure_future(put("second"))
        go.set()
        await second
        assert names() == {"first", "second"}

    asyncio.run(story())
    _put, names = opened(path)
    assert names() == {"first", "second"}


def test_a_file_of_another_shape_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    statefile.write_state(path, {"version": 1, "holds": [{"request_id": "r", "resource": 7}]})
    assert list(Holds(path)) == []


def test_a_hold_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, hold = tmp_path / "state.json", Hold("r", "vgpud.io/gpu", frozenset({"a", "b"}), "ns/pod/one")
    asyncio.run(Holds(path).put(hold))
    assert list(Holds(path)) == [hold]

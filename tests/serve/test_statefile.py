"""State beside the ledger is written in the order of its changes, also by cancelled calls."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

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


GOOD = {"request_id": "good", "resource": "vgpud.io/gpu", "ids": ["a"]}


@pytest.mark.parametrize("bad", [{"request_id": "bad", "resource": 7}, 7, None])
def test_an_entry_that_cannot_be_read_is_left_out_and_logged(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "state.json"
    statefile.write_state(path, {"version": 1, "holds": [bad, GOOD]})
    with capture_logs() as lines:
        assert [hold.request_id for hold in Holds(path)] == ["good"]
    assert [line["event"] for line in lines] == ["state_entry_ignored"]


@pytest.mark.parametrize("text", ['{"version": 2, "holds": []}', "[]", "half writ"])
def test_a_file_of_another_version_or_shape_is_kept_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    held = Holds(path)
    assert list(held) == []
    asyncio.run(held.put(Hold("r", "vgpud.io/gpu", frozenset("a"))))
    assert (tmp_path / "state.unread").read_text() == text
    assert [hold.request_id for hold in Holds(path)] == ["r"]


def test_a_put_during_the_write_of_an_older_value_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, go, plain = threading.Event(), threading.Event(), statefile.write_state
    path = tmp_path / "state.json"
    old, new = Hold("r", "old", frozenset()), Hold("r", "new", frozenset())

    def held_up(path: Path, body: dict[str, Any]) -> None:
        writes.set()
        go.wait(60)
        plain(path, body)

    async def story() -> None:
        held = Holds(path)
        await held.put(old)
        monkeypatch.setattr(statefile, "write_state", held_up)
        first = asyncio.ensure_future(held.put(new))
        await asyncio.to_thread(writes.wait, 60)
        second = asyncio.ensure_future(held.put(old))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, second)
        assert list(held) == [old]

    asyncio.run(story())
    assert list(Holds(path)) == [old]


def test_a_written_hold_is_read_back(tmp_path: Path) -> None:
    path, hold = tmp_path / "state.json", Hold("r", "vgpud.io/gpu", frozenset({"a", "b"}), "ns/pod/one")
    asyncio.run(Holds(path).put(hold))
    assert list(Holds(path)) == [hold]

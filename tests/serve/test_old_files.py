"""State files of earlier versions, and the tables of the ledger into which vgpud moves their values."""

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from vgpud.ledger import Ledger, RowTable
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.dra.prepared import Answer, Prepared, PreparedClaims
from vgpud.serve.kubelet.holds import Hold, Holds
from vgpud.serve.old_files import take_over

# the files as the last version that used them wrote them
HOLDS = {
    "version": 1,
    "holds": [{"request_id": "r", "resource": "vgpud.io/gpu", "ids": ["a", "b"], "pod": "ns/pod/one"}],
}
CLAIMS = {
    "version": 1,
    "claims": [
        {
            "uid": "u",
            "namespace": "ns",
            "name": "claim",
            "request_ids": ["claim/u"],
            "answers": [
                {"request": "one", "pool": "n", "device": "gpu-0", "cdi": ["vgpud.io/vgpu=x"], "share": ""}
            ],
        }
    ],
}
CONTAINERS = {"version": 1, "boot_id": "boot", "inits": {"r": [[17, 4711], [18, 4712]]}}
FILES = {"kubelet.json": HOLDS, "claims.json": CLAIMS, "containers.json": CONTAINERS}


def with_ledger(folder: Path, work: Callable[[Ledger], Awaitable[None]]) -> None:
    async def run() -> None:
        async with await Ledger.open(folder / "ledger.db") as ledger:
            await work(ledger)

    asyncio.run(run())


async def taken_over(ledger: Ledger, folder: Path) -> None:
    rows = ledger.rows
    tables = (RowTable.KUBELET_HOLDS, RowTable.PREPARED_CLAIMS, RowTable.CONTAINERS)
    await take_over(folder, ledger.sync, *(rows[table] for table in tables))


def test_state_files_of_an_earlier_version_are_moved_to_the_ledger(tmp_path: Path) -> None:
    for name, body in FILES.items():
        (tmp_path / name).write_text(json.dumps(body))

    async def read(ledger: Ledger) -> None:
        assert list(Holds(ledger.rows[RowTable.KUBELET_HOLDS])) == [
            Hold("r", "vgpud.io/gpu", frozenset({"a", "b"}), "ns/pod/one")
        ]
        answer = Answer("one", "n", "gpu-0", ("vgpud.io/vgpu=x",))
        assert list(PreparedClaims(ledger.rows[RowTable.PREPARED_CLAIMS])) == [
            Prepared("u", "ns", "claim", ("claim/u",), (answer,))
        ]
        rows = sorted(ledger.rows[RowTable.CONTAINERS])
        assert rows == [("r", "17", "4711", "boot", ""), ("r", "18", "4712", "boot", "")]

    async def start(ledger: Ledger) -> None:
        await taken_over(ledger, tmp_path)
        await read(ledger)

    with_ledger(tmp_path, start)
    assert not [name for name in FILES if (tmp_path / name).exists()]
    with_ledger(tmp_path, read)


def test_an_old_state_file_that_cannot_be_opened_stays(tmp_path: Path) -> None:
    (tmp_path / "kubelet.json").mkdir()
    with capture_logs() as lines:
        with_ledger(tmp_path, lambda ledger: taken_over(ledger, tmp_path))
    assert [line["event"] for line in lines] == ["old_state_file_ignored"]
    assert (tmp_path / "kubelet.json").exists()


@pytest.mark.parametrize("text", ['{"version": 2, "holds": []}', "[]", "half writ"])
def test_an_old_state_file_of_another_version_or_shape_is_kept_under_another_name(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "kubelet.json").write_text(text)
    with capture_logs() as lines:
        with_ledger(tmp_path, lambda ledger: taken_over(ledger, tmp_path))
    assert [line["event"] for line in lines] == ["old_state_file_ignored"]
    assert (tmp_path / "kubelet.unread").read_text() == text
    assert not (tmp_path / "kubelet.json").exists()


def test_an_old_state_file_that_can_be_neither_read_nor_renamed_is_logged(tmp_path: Path) -> None:
    (tmp_path / "kubelet.json").write_text("half writ")
    (tmp_path / "kubelet.unread").mkdir()
    (tmp_path / "containers.json").write_text('{"version": 1, "inits": {"r": 7}}')
    with capture_logs() as lines:
        with_ledger(tmp_path, lambda ledger: taken_over(ledger, tmp_path))
    assert [line["event"] for line in lines] == ["old_state_file_ignored"] * 2
    assert "it cannot be kept: Is a directory" in lines[0]["why"]
    assert lines[1]["key"] == "inits"
    assert (tmp_path / "kubelet.json").exists()


def test_an_old_state_file_that_cannot_be_deleted_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a later start would take its values over again."""

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async def work(ledger: Ledger) -> None:
        monkeypatch.setattr(Path, "unlink", denied)
        await taken_over(ledger, tmp_path)

    (tmp_path / "kubelet.json").write_text(json.dumps(HOLDS))
    with pytest.raises(VgpuError, match="the file cannot be deleted: Permission denied") as raised:
        with_ledger(tmp_path, work)
    assert raised.value.code is ErrorCode.LEDGER_FAILED


@pytest.mark.parametrize("bad", ['{"request_id": "bad", "resource": 7}', "7", "half writ"])
def test_a_row_of_an_old_state_file_that_cannot_be_read_is_left_out_and_logged_once(
    tmp_path: Path, bad: str
) -> None:
    async def work(ledger: Ledger) -> None:
        rows = ledger.rows[RowTable.KUBELET_HOLDS]
        await rows.put(("bad", bad))
        held = Holds(rows)
        hold = Hold("r", "vgpud.io/gpu", frozenset({"a"}), "ns/pod/one")
        await held.put(hold)
        with capture_logs() as lines:
            assert list(held) == list(held) == [hold]
        assert [line["event"] for line in lines] == ["ledger_row_ignored"]
        assert held.get("bad") is None
        await held.drop("bad")
        assert list(rows) == [("r", rows.get("r")[1])]  # type: ignore[index]

    with_ledger(tmp_path, work)

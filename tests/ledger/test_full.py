"""The ledger with a full state directory, on a file system of its own."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.ledger.samples import active, allocation, event, ledger_path
from vgpud.ledger import Ledger
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import State

pytestmark = needs("root", "namespaces")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk_is_reported_and_the_ledger_recovers_with_space(small: Path) -> None:
    async def work() -> None:
        async with await Ledger.open(ledger_path(small)) as ledger:
            kept: list[str] = []
            (small / "ballast").write_bytes(bytes(300_000))
            with pytest.raises(VgpuError) as caught:
                for number in range(1000):
                    await ledger.intent(allocation(number))
                    kept.append(f"a{number}")
            assert caught.value.code is ErrorCode.LEDGER_FULL
            assert "0B free of 1MiB" in caught.value.sentence
            assert [a.id for a in (await ledger.load()).allocations] == kept
            (small / "ballast").unlink()
            await ledger.intent(allocation(5000))
            await ledger.commit(active(allocation(5000)), event("a5000"))
        async with await Ledger.open(ledger_path(small)) as ledger:
            found = (await ledger.load()).allocations
            assert [a.id for a in found] == [*kept, "a5000"]
            assert found[-1].state is State.ACTIVE

    asyncio.run(work())


def test_a_start_on_a_full_disk_is_refused(small: Path) -> None:
    with (small / "ballast").open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(65536))
            file.flush()

    async def work() -> None:
        async with await Ledger.open(ledger_path(small)):
            pass

    with pytest.raises(VgpuError) as caught:
        asyncio.run(work())
    assert caught.value.code is ErrorCode.LEDGER_FULL
    (small / "ballast").unlink()
    asyncio.run(work())

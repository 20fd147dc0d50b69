"""Tables of the ledger for small state that survives a restart. A row of a table is a tuple of texts."""

from collections.abc import Iterator
from typing import Protocol

Row = tuple[str, ...]


class Rows(Protocol):
    """One table, also held in memory. The first columns of a row are its key; rows are in the order of their
    last change.
    """

    @property
    def changes(self) -> int:
        """The number of changes since the start. It grows when readers can see the change."""
        ...

    def __iter__(self) -> Iterator[Row]: ...

    def get(self, *key: str) -> Row | None: ...

    async def put(self, row: Row) -> None:
        """Writes a row in place of the one with the same key. Raises VgpuError (LEDGER_FULL,
        LEDGER_READ_ONLY, LEDGER_CORRUPT, LEDGER_FAILED), and then changes nothing.
        """
        ...

    async def drop(self, *key: str) -> None:
        """Deletes a row; succeeds if there is none. Raises VgpuError as `put` does."""
        ...

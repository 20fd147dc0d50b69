"""Dataclasses of one kind in a table of the ledger, one row each: a key, and the value as JSON."""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from vgpud.model.log_event import LogEvent
from vgpud.model.rows import Rows

T = TypeVar("T")
log = structlog.get_logger(__name__)

_DECODED_KEPT = 8192


@cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """The adapter of a dataclass. It takes some milliseconds to make."""
    return TypeAdapter(kind)


class Documents(Generic[T]):
    """The dataclasses in one table. A row that cannot be read is left out and logged. `put` and `drop` raise
    VgpuError as the methods of Rows do, and then change nothing.
    """

    def __init__(self, rows: Rows, kind: type[T], key: Callable[[T], str]) -> None:
        self._rows = rows
        self._key = key
        self._kind: TypeAdapter[T] = adapter(kind)  # type: ignore[arg-type] # a class is hashable
        self._name = kind.__name__
        self._decode = lru_cache(_DECODED_KEPT)(self._read)

    def __iter__(self) -> Iterator[T]:
        return (value for row in self._rows if (value := self._decode(*row)) is not None)

    def get(self, key: str) -> T | None:
        row = self._rows.get(key)
        return None if row is None else self._decode(*row)

    async def put(self, value: T) -> None:
        await self._rows.put((self._key(value), self._kind.dump_json(value).decode()))

    async def drop(self, key: str) -> None:
        await self._rows.drop(key)

    def _read(self, key: str, text: str) -> T | None:
        try:
            return self._kind.validate_json(text)
        except ValidationError as error:
            log.warning(LogEvent.LEDGER_ROW_IGNORED, kind=self._name, key=key, why=str(error))
            return None

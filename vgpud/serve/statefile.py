"""Keeps small state beside the ledger, in a JSON file that is replaced atomically."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent

T = TypeVar("T")
log = structlog.get_logger(__name__)

_VERSION = 1

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def write_state(path: Path, body: dict[str, Any]) -> None:
    """Writes the file; it is durable when this returns. Raises VgpuError(LEDGER_FAILED)."""
    draft = path.with_suffix(".new")
    try:
        fd = os.open(draft, _WRITE, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(body, file)
            file.flush()
            os.fsync(fd)
        draft.replace(path)
    except OSError as error:
        raise VgpuError(
            ErrorCode.LEDGER_FAILED,
            f"{path} cannot be written: {error.strerror}",
            "check its folder's rights and free space",
        ) from None


def read_state(path: Path, version: int) -> dict[str, Any]:
    """The content of the file; empty if it is missing, cannot be read, is not JSON, or has another version.
    In the last two cases the file is renamed, because the next change would overwrite it.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning(LogEvent.STATE_FILE_IGNORED, file=str(path), why=str(error))
        return {}
    except ValueError as error:
        return _kept_aside(path, str(error))
    if isinstance(body, dict) and body.get("version") == version:
        return body
    return _kept_aside(path, f"it is not of version {version}")


def _kept_aside(path: Path, why: str) -> dict[str, Any]:
    """Renames a file that is not JSON or of another version, and returns an empty state."""
    kept = path.with_suffix(".unread")
    try:
        path.replace(kept)
    except OSError as error:
        why = f"{why}; it cannot be kept: {error.strerror}"
    log.warning(LogEvent.STATE_FILE_IGNORED, file=str(path), kept=str(kept), why=why)
    return {}


class StateFile(Generic[T]):
    """Dataclasses of one kind by key, in memory and in a file that each change writes as a whole.

    A file that cannot be read counts as empty, and an entry that cannot be read is left out. Changes raise
    VgpuError(LEDGER_FAILED) if the file cannot be written, and then change nothing. Changes run one after the
    other, also if a caller is cancelled.
    """

    def __init__(self, path: Path, name: str, kind: type[T], key: Callable[[T], str]) -> None:
        self._path = path
        self._name = name
        self._key = key
        self._kind = TypeAdapter(kind)
        self._all = {key(value): value for value in self._read()}
        self._writing = asyncio.Lock()

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._all.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._all

    def get(self, key: str) -> T | None:
        return self._all.get(key)

    async def put(self, value: T) -> None:
        await asyncio.shield(self._change(self._key(value), value))

    async def drop(self, key: str) -> None:
        await asyncio.shield(self._change(key, None))

    async def _change(self, key: str, value: T | None) -> None:
        async with self._writing:
            if self._all.get(key) == value:  # the comparison is made after earlier changes have been written
                return
            changed = {name: other for name, other in self._all.items() if name != key}
            if value is not None:
                changed[key] = value
            values = [self._kind.dump_python(one, mode="json") for one in changed.values()]
            await asyncio.to_thread(write_state, self._path, {"version": _VERSION, self._name: values})
            self._all = changed

    def _read(self) -> Iterator[T]:
        entries = read_state(self._path, _VERSION).get(self._name, ())
        for entry in entries if isinstance(entries, list) else ():
            try:
                yield self._kind.validate_python(entry)
            except ValidationError as error:
                log.warning(LogEvent.STATE_ENTRY_IGNORED, file=str(self._path), why=str(error))

"""Takes over the state of the servers for Kubernetes from the JSON files of earlier versions."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.rows import Row, Rows

log = structlog.get_logger(__name__)

_VERSION = 1


async def take_over(
    state_dir: Path, sync: Callable[[], Awaitable[None]], holds: Rows, claims: Rows, containers: Rows
) -> None:
    """Copies each file's entries into its table of the ledger, makes them durable with `sync`, then deletes
    the file. After a crash in between, the next start copies them again: nothing else changes the tables
    until then.

    A file that cannot be opened stays; one that is not JSON or of another version is renamed. Raises
    VgpuError(LEDGER_FAILED) and the errors of Rows.
    """
    files = (("kubelet.json", holds), ("claims.json", claims), ("containers.json", containers))
    for name, rows in files:
        path = state_dir / name
        body = read_state(path)
        if body is None:
            continue
        for row in _ROWS[name](body):
            await rows.put(row)
        await sync()
        try:
            path.unlink()
        except OSError as error:
            raise VgpuError(
                ErrorCode.LEDGER_FAILED,
                f"the ledger has the content of {path}, but the file cannot be deleted: {error.strerror}",
                "check its folder's rights",
            ) from None


def read_state(path: Path) -> dict[str, Any] | None:
    """The content of the file; None if it is missing, cannot be opened, is not JSON, or has another version.
    In the last two cases the file is renamed.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning(LogEvent.OLD_STATE_FILE_IGNORED, file=str(path), why=str(error))
        return None
    except (ValueError, RecursionError) as error:
        _keep_aside(path, str(error))
        return None
    if isinstance(body, dict) and body.get("version") == _VERSION:
        return body
    _keep_aside(path, f"it is not of version {_VERSION}")
    return None


def _keep_aside(path: Path, why: str) -> None:
    kept = path.with_suffix(".unread")
    try:
        path.replace(kept)
    except OSError as error:
        why = f"{why}; it cannot be kept: {error.strerror}"
    log.warning(LogEvent.OLD_STATE_FILE_IGNORED, file=str(path), kept=str(kept), why=why)


def _documents(entries: object, key: str) -> list[Row]:
    found = entries if isinstance(entries, list) else []
    return [
        (str(entry[key]), json.dumps(entry)) for entry in found if isinstance(entry, dict) and key in entry
    ]


def _inits(body: Mapping[str, Any]) -> list[Row]:
    inits, boot_id = body.get("inits"), str(body.get("boot_id"))
    try:
        return [
            (str(request_id), str(int(pid)), str(int(ticks)), boot_id, "")
            for request_id, of in (inits or {}).items()
            for pid, ticks in of
        ]
    except (AttributeError, TypeError, ValueError) as error:
        log.warning(LogEvent.OLD_STATE_FILE_IGNORED, key="inits", why=str(error))
        return []


_ROWS = {
    "kubelet.json": lambda body: _documents(body.get("holds"), "request_id"),
    "claims.json": lambda body: _documents(body.get("claims"), "uid"),
    "containers.json": _inits,
}

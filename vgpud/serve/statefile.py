"""Small state beside the ledger, in a file of JSON: whole or as it was."""

import json
import os
from pathlib import Path
from typing import Any

import structlog

from vgpud.model.errors import ErrorCode, VgpuError

log = structlog.get_logger(__name__)

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def write_state(path: Path, body: dict[str, Any]) -> None:
    """Durable when it returns. Raises VgpuError(LEDGER_FAILED)."""
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
    """Empty where there is none of this version, or none that can be read: its owner can do without."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("cannot read the state, going on without", file=str(path), why=str(error))
        return {}
    return body if isinstance(body, dict) and body.get("version") == version else {}

"""Reads files that are named on the command line: regular files, of a bounded size."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError

# hundreds of manifests; PyYAML takes some 10 s for so much
MAX_BYTES = 1024**2


def read_text(path: Path, hint: str, most_bytes: int = MAX_BYTES) -> str:
    """The text of a file, without a byte order mark. Raises VgpuError(BAD_REQUEST) with `hint` if it is no
    regular file, is larger than `most_bytes` or is not UTF-8.
    """
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            # opening a FIFO would wait for a writer, and /dev/zero has no end
            raise VgpuError(ErrorCode.BAD_REQUEST, f"{path} is not a regular file", hint)
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise VgpuError(ErrorCode.BAD_REQUEST, f"cannot read {path}: {why}", hint) from None
    return decoded(str(path), raw, hint, most_bytes)


def decoded(name: str, raw: bytes, hint: str, most_bytes: int = MAX_BYTES) -> str:
    """The text of `raw`, which has more than `most_bytes` if the file has. Raises VgpuError(BAD_REQUEST)."""
    if len(raw) > most_bytes:
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{name} is larger than {most_bytes} bytes", hint)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise VgpuError(
            ErrorCode.BAD_REQUEST, f"{name}: byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8", hint
        ) from None


def read_toml(path: Path, hint: str) -> Mapping[str, Any]:
    """The values of a TOML file, with the bounds of policy files. Raises VgpuError(BAD_REQUEST)."""
    from vgpud.policy import source

    found = source.parse(path, read_text(path, hint, source.MAX_FILE_BYTES))
    if isinstance(found, source.Source):
        return found.data
    raise VgpuError(ErrorCode.BAD_REQUEST, f"{found.origin}: {found.sentence}", hint)

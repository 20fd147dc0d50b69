"""Reads files that are named on the command line: regular files, of a bounded size."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vgpud.model.errors import ErrorCode, VgpuError

# maximum size of a file: enough for hundreds of manifests; PyYAML needs some 10 s for so much
MAX_BYTES = 1024**2


def read_text(path: Path, hint: str, most_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file, without a byte order mark. Raises VgpuError(BAD_REQUEST) with `hint` if the
    file cannot be read, is not regular, is larger than `most_bytes` or is not UTF-8.
    """
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            # opening a FIFO would wait for a writer, and /dev/zero has no end
            raise VgpuError(ErrorCode.BAD_REQUEST, f"{path} is not a regular file", hint)
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise VgpuError(ErrorCode.BAD_REQUEST, f"cannot read {path}: {why}", hint) from None
    return decoded(str(path), raw, hint, most_bytes)


def decoded(name: str, raw: bytes, hint: str, most_bytes: int = MAX_BYTES) -> str:
    """Decodes the bytes `raw` of the file or stream `name`. The caller reads at most one byte more than
    `most_bytes`; if that byte is there, the file is refused. Raises VgpuError(BAD_REQUEST).
    """
    if len(raw) > most_bytes:
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{name} is larger than {most_bytes} bytes", hint)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise VgpuError(
            ErrorCode.BAD_REQUEST, f"{name}: byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8", hint
        ) from None


def read_toml(path: Path, hint: str) -> Mapping[str, Any]:
    """Reads a TOML file with the size limit of policy files. Raises VgpuError(BAD_REQUEST)."""
    from vgpud.policy import source

    found = source.parse(path, read_text(path, hint, source.MAX_FILE_BYTES))
    if isinstance(found, source.Source):
        return found.data
    raise VgpuError(ErrorCode.BAD_REQUEST, f"{found.origin}: {found.sentence}", hint)

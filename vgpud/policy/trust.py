"""Finds out which users can change a file. Such a user gets the rights of the program that obeys the file."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST_LINKS = 40  # the same limit as the kernel's MAXSYMLINKS


class Distrust(NamedTuple):
    """Says that a user other than the trusted ones can change a file, and how to repair that."""

    sentence: str
    fix: str


def distrust(path: Path, trusted_uid: int = 0) -> Distrust | None:
    """Checks who can change the file or folder `path`. Returns None if only root and `trusted_uid` can, by
    their rights on `path` and on each folder and symlink on the way. After the result None, no other user can
    gain the right to change the file. Raises OSError.

    A folder on the way may be writable for others if it is sticky, as /tmp is, because its entries have their
    own owners; `path` itself may not. If `trusted_uid` is not root, write rights of groups are accepted.
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would hide the links
    for place, status in _way(whole):
        if status.st_uid not in (0, trusted_uid):
            return Distrust(f"uid {status.st_uid} owns {place}, and could change it", f"chown root {place}")
        is_passed = stat.S_ISDIR(status.st_mode) and place != whole and bool(status.st_mode & stat.S_ISVTX)
        others = stat.S_IWOTH if trusted_uid else stat.S_IWOTH | stat.S_IWGRP
        if not stat.S_ISLNK(status.st_mode) and not is_passed and status.st_mode & others:
            sentence = (
                f"others can write to {place} (mode {stat.S_IMODE(status.st_mode):04o}, gid {status.st_gid})"
            )
            return Distrust(sentence, f"chmod go-w {place}")
    return None


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields each folder, symlink and file that the kernel passes on the way to `path`, from the root on."""
    left, at, links = list(reversed(path.parts[1:])), Path("/"), 0
    yield at, at.lstat()
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        here = at / part
        status = here.lstat()
        yield here, status
        if not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        links += 1
        target = here.readlink()
        if links > _MOST_LINKS:
            return  # opening such a path fails with ELOOP
        if target.is_absolute():
            at = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)

"""Which users can change what a path leads to: they have the rights of a program that obeys it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST_LINKS = 40  # MAXSYMLINKS of Linux


class Distrust(NamedTuple):
    """A user other than the trusted ones can change what a path leads to, and how to mend it."""

    sentence: str
    fix: str


def distrust(path: Path, trusted_uid: int = 0) -> Distrust | None:
    """None if root and `trusted_uid` alone can change the file or folder `path`, by its own rights or by
    those of a folder or symlink on the way. The answer None stays true until one of them changes it. Raises
    OSError.

    A folder on the way may be writable if it is sticky, as /tmp is, because what it holds has owners of its
    own; `path` itself may not. The groups of `trusted_uid` are trusted if that is not root.
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
    """Each folder, symlink and file that the kernel passes on the way to `path`, from the root on."""
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
            return  # to open it fails with ELOOP
        if target.is_absolute():
            at = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)

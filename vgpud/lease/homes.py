"""File systems of a user's leases, which vgpud.service makes at its start: RUN_DIR/tenants/0, 1, 2 ...

A tenant can use up the file system of its `usage` file: by blocks, by extended attributes, and after the end
of its lease by a file that its processes keep open. So each user has a file system of its own while there are
enough. It keeps it until the kernel has nothing of the user's left there, so that a user cannot use up
several of them. A user for whom none is left is a guest on another's, until one is empty. Where there are
none at all, all leases are in the folder `leases` of the run folder.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = "tenants"
_LEASES = "leases"
# beginnings of the names of empty files: the user that got the file system, and a user that is a guest there
_USER, _GUEST = ".user-", ".guest-"
_LINK = re.compile(rf"\.\./{_FOLDER}/(\w+)/{_LEASES}/([\w.-]+)")


def homes(root: Path) -> list[Path]:
    """The folders for leases on file systems of their own; `root` is the folder of all leases."""
    return sorted((root.parent / _FOLDER).glob(f"*/{_LEASES}"))


def link(home: Path, allocation: str) -> None:
    """Makes the link in the folder of all leases, if `home` is another folder. Raises OSError."""
    if home.parent.parent.name == _FOLDER:
        place = home.parent.parent.with_name(_LEASES) / allocation
        if place_of(place) != home / allocation:
            place.unlink(missing_ok=True)
            place.symlink_to(f"../{_FOLDER}/{home.parent.name}/{_LEASES}/{allocation}")


def place_of(folder: Path) -> Path:
    """The folder of a lease, which may be a link in the folder of all leases."""
    with suppress(OSError):
        found = _LINK.fullmatch(str(folder.readlink()))
        if found is not None and found[2] == folder.name:
            return folder.parent.parent / _FOLDER / found[1] / _LEASES / folder.name
    return folder


def home_for(root: Path, user: str) -> Path:
    """The folder in which a lease of `user` is made. If all file systems are in use, the user shares one with
    room. For a user of this lease only, give "": no name of it is left. Raises OSError.
    """
    found = homes(root)
    if not found:
        return root
    own = _named(found, _USER + user)
    if own is not None:
        return own
    empty = next(filter(_forget_users, found), None)
    if empty is not None:
        return _name(empty, _USER, user)
    return _named(found, _GUEST + user) or _name(max(found, key=_room), _GUEST, user)


def _named(found: list[Path], name: str) -> Path | None:
    return next((home for home in found if (home.parent / name).exists()), None)


def _name(home: Path, kind: str, user: str) -> Path:
    if user:
        (home.parent / f"{kind}{user}").touch(mode=0o600)
    return home


def _forget_users(home: Path) -> bool:
    """Removes the names of the users if nothing else is left on the file system. Returns whether it is empty.

    A removed file counts while a process has it open.
    """
    names, about = list(home.parent.glob(".*-*")), os.statvfs(home)
    used = about.f_files - about.f_ffree
    if used > 2 + len(names):  # 2: the file system's folder and its folder of leases
        return False
    for name in names:
        name.unlink()
    return True


def _room(home: Path) -> tuple[bool, int]:
    """The file system with the highest result is shared: one with the fewest leases of those with room."""
    about = os.statvfs(home)
    has_room = about.f_bavail > about.f_blocks // 2 and about.f_favail > about.f_files // 2
    return has_room, -sum(1 for _ in home.iterdir())


def leftovers(root: Path) -> Iterator[Path]:
    """Folders on the users' file systems to which no link leads: drafts, and leases being removed."""
    for home in homes(root):
        for folder in home.iterdir():
            if place_of(root / folder.name) != folder:
                yield folder

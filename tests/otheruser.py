"""Runs programs as another user, from a source tree that may be closed to other users."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_OTHERS_MAY_ENTER = 0o001


def open_place() -> Path:
    """A folder for temporary files that every user may enter: TMPDIR if it is such a folder, else /tmp."""

    def is_open(place: Path) -> bool:
        return all(folder.stat().st_mode & _OTHERS_MAY_ENTER for folder in (place, *place.parents))

    own = Path(tempfile.gettempdir()).resolve()
    return own if is_open(own) else Path("/tmp")


@contextmanager
def open_folder() -> Iterator[Path]:
    """A new folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="vgo-", dir=open_place()) as made:
        Path(made).chmod(0o755)
        yield Path(made)


def as_user(uid: int, gid: int, groups: Sequence[int] = ()) -> list[str]:
    """The beginning of a command line that runs a command as this user: setpriv of util-linux.

    The caller is root. The program keeps CAP_DAC_READ_SEARCH, so it can read a source tree below /root. To
    connect to a socket it still needs write permission, which that capability does not give.
    """
    named = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    keep = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "util-linux's setpriv is not installed"
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", named, *keep, "--"]

"""Programs as another user, from a checkout that may be closed to others."""

import shutil
from collections.abc import Sequence


def as_user(uid: int, gid: int, groups: Sequence[int] = ()) -> list[str]:
    """The words to put before a command: setpriv of util-linux; the caller is root.

    The program keeps CAP_DAC_READ_SEARCH, so it can read a tree below /root; a socket needs write
    permission to connect, which that capability does not give.
    """
    named = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    keep = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "util-linux's setpriv is not installed"
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", named, *keep, "--"]

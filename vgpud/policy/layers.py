"""Selects the files of the policy and their order.

Lowest first: the vendor's drop-ins, the main file, then the drop-ins under /run and /etc together, each group
in the order of the file names. A drop-in hides drop-ins with the same name in lower directories (/usr/lib <
/run < /etc). A symlink to /dev/null hides other drop-ins and has no content. systemd has the same rules for
its own drop-ins (systemd.unit(5), "standard-conf").
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vgpud.policy.origin import Origin, Problem
from vgpud.policy.trust import Distrust, distrust


@dataclass(frozen=True, slots=True)
class PolicyPaths:
    """The places of policy files. A directory that is None or missing has no drop-ins.

    A main file that does not exist means the built-in policy, unless `main_required`.
    """

    main: Path = Path("/etc/vgpud/vgpud.toml")
    vendor_dir: Path | None = Path("/usr/lib/vgpud/conf.d")
    run_dir: Path | None = Path("/run/vgpud/conf.d")
    admin_dir: Path | None = Path("/etc/vgpud/conf.d")
    main_required: bool = False
    # True if root's daemon obeys the files, so that only root may be able to change them
    is_roots: bool = False


def select(paths: PolicyPaths) -> tuple[tuple[Path, ...], tuple[Problem, ...]]:
    """The files to read, lowest first, and the directories that could not be listed."""
    problems: list[Problem] = []
    vendor = _drop_ins(paths.vendor_dir, problems)
    runtime = _drop_ins(paths.run_dir, problems)
    admin = _drop_ins(paths.admin_dir, problems)
    above = {**runtime, **admin}
    below = {name: path for name, path in vendor.items() if name not in above}
    main = (paths.main,) if paths.main_required or os.path.lexists(paths.main) else ()
    return (*_in_order(below), *main, *_in_order(above)), tuple(problems)


def distrusted(paths: PolicyPaths, files: Iterable[Path]) -> Iterator[Problem]:
    """If `is_roots`: the policy files and drop-in directories that a user other than root can change."""
    folders = (one for one in (paths.vendor_dir, paths.run_dir, paths.admin_dir) if one is not None)
    told: set[Distrust] = set()  # folders reported so far, because one folder is above many files
    for path in (*folders, *files) if paths.is_roots else ():
        # the folder does not exist; for a file, the error is reported when it is read
        with suppress(OSError):
            found = distrust(path)
            if found is not None and found not in told:
                told.add(found)
                yield Problem(Origin(path), "", found.sentence, found.fix)


def _drop_ins(directory: Path | None, problems: list[Problem]) -> dict[str, Path]:
    if directory is None:
        return {}
    try:
        names = os.listdir(directory)  # noqa: PTH208 - only the names decide which drop-in is hidden
    except FileNotFoundError:
        return {}
    except OSError as error:
        sentence = f"the drop-in directory cannot be read: {(error.strerror or str(error)).lower()}"
        problems.append(Problem(Origin(directory), "", sentence, "make it readable to vgpud, or remove it"))
        return {}
    return {name: directory / name for name in names if name.endswith(".toml") and not name.startswith(".")}


def _in_order(files: dict[str, Path]) -> tuple[Path, ...]:
    return tuple(files[name] for name in sorted(files) if not _is_mask(files[name]))


def _is_mask(path: Path) -> bool:
    return path.is_symlink() and os.path.realpath(path) == os.devnull

"""The policy files of this host, found by the VGPUD_* settings."""

import os
from pathlib import Path

from vgpud.ctl.terminal import Terminal
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.layers import PolicyPaths, distrusted, select
from vgpud.policy.load import LoadedPolicy, bad_policy, check, load
from vgpud.policy.trust import distrust


def paths() -> PolicyPaths:
    """The paths of the policy files, found as the daemon finds them (settings.py), with the assumption that
    this process has the daemon's environment.
    """
    main = os.environ.get("VGPUD_CONFIG")
    config = Path(main or "/etc/vgpud/vgpud.toml")
    run_dir = Path(os.environ.get("VGPUD_RUN_DIR") or "/run/vgpud")
    return PolicyPaths(
        main=config,
        main_required=main is not None,
        vendor_dir=Path("/usr/lib/vgpud/conf.d"),
        run_dir=run_dir / "conf.d",
        admin_dir=config.parent / "conf.d",
        is_roots=_daemon_uid(run_dir) == 0,
    )


def _daemon_uid(run_dir: Path) -> int:
    """The user that vgpud runs as: the owner of its run folder, or root if the folder cannot be examined."""
    try:
        return run_dir.stat().st_uid
    except OSError:
        return 0


def on_disk() -> LoadedPolicy:
    """Loads the policy files of this host. Raises VgpuError(BAD_POLICY)."""
    return load(paths())


def one_file(name: str, terminal: Terminal) -> LoadedPolicy:
    """The policy of one file. Rights that vgpud refuses are a mistake if vgpud reads the file; otherwise
    they cause a warning.
    Raises VgpuError: BAD_POLICY with a detail for each mistake, BAD_REQUEST for a directory.
    """
    path = Path(name)
    if path.is_dir():
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{name!r} is a directory", "name one TOML file")
    loaded = check(path)
    here = paths()
    if path.absolute() in select(here)[0]:
        if problems := [*distrusted(here, [path.absolute()])]:
            raise bad_policy(problems)
    elif found := distrust(path, os.geteuid()):
        terminal.say(f"warning: vgpud would refuse it here: {found.sentence}; {found.fix}")
    return loaded

"""The policy files of this host, found by the VGPUD_* settings."""

import os
from pathlib import Path

from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import LoadedPolicy, load


def paths() -> PolicyPaths:
    """The paths that settings.py uses, from this process's environment, which is assumed to equal the
    daemon's.
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
    """The user that vgpud runs as; root where no daemon has made the run folder."""
    try:
        return run_dir.stat().st_uid
    except OSError:
        return 0


def on_disk() -> LoadedPolicy:
    """Raises VgpuError(BAD_POLICY)."""
    return load(paths())

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
    return PolicyPaths(
        main=config,
        main_required=main is not None,
        vendor_dir=Path("/usr/lib/vgpud/conf.d"),
        run_dir=Path(os.environ.get("VGPUD_RUN_DIR") or "/run/vgpud") / "conf.d",
        admin_dir=config.parent / "conf.d",
    )


def on_disk() -> LoadedPolicy:
    """Raises VgpuError(BAD_POLICY)."""
    return load(paths())

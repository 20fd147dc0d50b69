"""The policy as the files of this host have it, with the daemon's own VGPUD_* settings."""

import os
from pathlib import Path

from vgpud.policy.layers import PolicyPaths
from vgpud.policy.load import LoadedPolicy, load


def paths() -> PolicyPaths:
    """As vgpud's settings make them (settings.py); its environment is taken to be this one."""
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

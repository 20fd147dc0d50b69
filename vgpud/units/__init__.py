"""Runs helper processes that outlive vgpud: as systemd units, or as detached children if systemd does not run
vgpud.
"""

import os
from pathlib import Path

from vgpud.proc import Running
from vgpud.units.base import Units, UnitSpec
from vgpud.units.child import ChildUnits
from vgpud.units.system import SystemdUnits

__all__ = ["ChildUnits", "Running", "SystemdUnits", "UnitSpec", "Units", "choose_units"]

_BOOTED = Path("/run/systemd/system")  # folder that exists if systemd is the init system: sd_booted(3)


def choose_units(run_dir: Path, booted: Path = _BOOTED) -> Units:
    """SystemdUnits if systemd runs this process as a service, else ChildUnits.

    INVOCATION_ID alone is no proof: a shell on a desktop inherits it. SYSTEMD_EXEC_PID (systemd.exec(5), from
    version 248) names the process that systemd started.
    """
    ours = os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
    if ours and "INVOCATION_ID" in os.environ and booted.is_dir():
        return SystemdUnits(run_dir)
    return ChildUnits(run_dir)

"""Mode `mps`: NVIDIA's MPS, supervised, with limits for each tenant. No client can connect before the limits
are set.
"""

from vgpud.modes.mps.mode import MpsMode
from vgpud.modes.mps.rules import MpsRules, MpsWorld, Users
from vgpud.modes.mps.supervisor import unit_name

__all__ = ["MpsMode", "MpsRules", "MpsWorld", "Users", "unit_name"]

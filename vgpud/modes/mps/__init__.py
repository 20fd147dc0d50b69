"""Mode `mps`: NVIDIA's MPS, supervised, sized per tenant, and never fail-open."""

from vgpud.modes.mps.mode import MpsMode
from vgpud.modes.mps.rules import MpsRules, MpsWorld, Users
from vgpud.modes.mps.supervisor import unit_name

__all__ = ["MpsMode", "MpsRules", "MpsWorld", "Users", "unit_name"]

"""The fixture of the simulated node."""

from __future__ import annotations

from tests.simnode import sim_node

__all__ = ["sim_node"]

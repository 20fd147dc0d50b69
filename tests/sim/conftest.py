"""The simulated node, and a CUDA program in Python for it."""

from __future__ import annotations

from tests.simnode import sim_node

__all__ = ["sim_node"]

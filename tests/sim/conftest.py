"""Fixtures of the simulated node, and a CUDA program in Python that runs on it."""

from __future__ import annotations

from tests.simnode import sim_node

__all__ = ["sim_node"]

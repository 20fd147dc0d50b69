"""Runs the tool as `python -m vgpu_sim`."""

from vgpu_sim.cli import main

raise SystemExit(main())

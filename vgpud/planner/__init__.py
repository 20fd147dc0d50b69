"""Decides, without side effects: which device and mode, which MIG placement, which steps."""

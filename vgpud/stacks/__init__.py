"""Unwinds stacks of other processes: frame sizes, and whether a thread waits inside the driver. Pure."""

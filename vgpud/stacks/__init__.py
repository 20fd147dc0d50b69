"""Stacks of other processes: how large a frame is, and whether a thread waits inside the driver; pure."""

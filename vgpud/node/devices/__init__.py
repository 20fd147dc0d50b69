"""Devices: what is on the node, the mode of each device, MIG layouts, and the steps of a plan."""

"""Devices: what is on the node, which mode a device is in, MIG layouts, and the steps of a plan."""

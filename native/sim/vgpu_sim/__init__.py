"""The tool of the simulated node: it reads TOML profiles, runs programs inside the node, and injects
faults.
"""

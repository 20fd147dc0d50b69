"""The simulated node's tool: TOML profiles, running programs inside the node, faults."""

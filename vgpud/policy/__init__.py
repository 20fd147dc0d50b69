"""Reads the policy: TOML files in layers become one typed policy, with the origin of every key."""

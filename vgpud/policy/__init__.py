"""TOML to typed, layered policy with the origin of every key."""

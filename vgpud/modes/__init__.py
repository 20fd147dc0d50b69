"""The effectors: one for each mode, with the same protocol."""

"""Edits to CDI specs and shell environments."""

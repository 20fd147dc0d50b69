"""Writes an allocation's edits into CDI specs, OCI configurations and environments."""

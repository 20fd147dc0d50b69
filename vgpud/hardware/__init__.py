"""The only door to NVML: immutable snapshots of the devices."""

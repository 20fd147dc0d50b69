"""The only door to NVML, and the programs that do what NVML cannot: reset, suspend, probe."""

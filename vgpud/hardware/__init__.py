"""The only room that calls NVML. It also runs the programs for what NVML cannot do: reset, suspend, probe."""

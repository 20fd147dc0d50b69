"""The only package that calls NVML. It also runs programs for what NVML cannot do: reset a device, suspend a
process, probe for an engine.
"""

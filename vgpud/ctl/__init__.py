"""vgpuctl: parse, call, print."""

"""vgpuctl: parses a command line, calls the daemon and prints the answer."""

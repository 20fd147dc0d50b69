"""What operators see: the use of slices, meters and processes."""

"""What operators are shown: use, meters and processes."""

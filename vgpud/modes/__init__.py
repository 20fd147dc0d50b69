"""One effector per mode behind one protocol."""

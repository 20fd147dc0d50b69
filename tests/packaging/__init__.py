"""The Debian packages: built, inspected, and installed in a booted Debian."""

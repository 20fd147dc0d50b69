"""The Debian packages: built, read, and lived through in a booted Debian 12."""

"""Benchmarks: figures for people to compare. They do not pass or fail."""
